"""The parts of `bench chaos`: its verdicts can be bad ones, and what it draws is a run."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch

from hpc_oldsgd.bench import chaos
from hpc_oldsgd.bench.chaos import cases, damage, faults
from hpc_oldsgd.bench.chaos.compare import difference, unlike
from hpc_oldsgd.bench.chaos.lives import judge
from hpc_oldsgd.checkpoints.store import FOLDER
from hpc_oldsgd.errors import UserError
from support import runs
from support.runs import SHORT, simulated

RUN = f"{SHORT} --keep 3 --threads 1"  # fixtures of a module are made before a test is told so


def test_drawn_runs_are_seeded_and_know_every_wire() -> None:
    drawn = [cases.draw(random.Random(f"a{k}")) for k in range(3)]
    assert drawn == [cases.draw(random.Random(f"a{k}")) for k in range(3)]
    assert len(set(drawn)) == 3 and {"same", "fp32", "bf16", "fp16"} <= set(cases.wires())


def test_faults_come_in_order_and_the_last_may_end_the_job() -> None:
    order = list(faults.PHASES)
    kinds = set()
    for k in range(300):
        drawn = faults.draw(random.Random(k), start_s=5.0)
        kinds.update(fault.kind for fault in drawn)
        assert not any(fault.kind in faults.ENDING for fault in drawn[:-1])
        phases = [order.index(fault.phase) for fault in drawn]
        assert phases == sorted(phases)
    assert kinds == {*faults.ENDING, *faults.PASSING}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(RUN, tmp_path_factory.mktemp("chaos") / "whole")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("chaos") / "broken"
    runs.crash(RUN, run, after=24)
    return run


def test_one_bit_is_a_difference(whole: Path, tmp_path: Path) -> None:
    same = simulated(RUN, tmp_path / "same")
    assert difference(whole, same) == ""
    other = simulated(f"{RUN} --alpha 0.0100001", tmp_path / "other")
    assert difference(whole, other).startswith("rank 0 has another state.runner.x")
    lines = (same / "metrics.jsonl").read_text().splitlines()
    (same / "metrics.jsonl").write_text("\n".join(lines[1:]) + "\n")
    assert difference(whole, same).startswith("metrics.jsonl has")
    assert difference(whole, same, rows_lost=True) == ""
    (same / "summary.json").unlink()
    assert difference(whole, same).startswith("no whole result")
    x = torch.zeros(3)
    assert unlike({"x": x}, {"x": -x}) == "state.x" and unlike([x], [x.clone()]) == ""
    assert unlike({"x": 1.0}, {"x": 1}) == "state.x" and unlike(float("nan"), float("nan")) == ""


def test_a_run_that_writes_meanwhile_does_not_disturb_the_fault(tmp_path: Path) -> None:
    """It makes its folder of checkpoints anew as soon as that is missing."""
    run, ended = tmp_path / "run", threading.Event()
    place = run / FOLDER

    def write() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                place.mkdir(parents=True)
                (place / "new").touch()

    (place / "round-1").mkdir(parents=True)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            undo = damage.away(run)
            assert place.is_symlink() and not place.exists()
            undo()
            assert [path.name for path in place.iterdir()] == ["round-1"]
    finally:
        ended.set()
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", damage.HARMLESS)
def test_damage_costs_no_bit(whole: Path, broken: Path, tmp_path: Path, kind: str) -> None:
    run = shutil.copytree(broken, tmp_path / "run")
    assert damage.harm(run, kind, random.Random(3)), kind
    simulated(f"{RUN} --resume auto", run)
    assert difference(whole, run, rows_lost=kind.startswith("metrics-")) == ""


@pytest.mark.parametrize("kind", damage.REFUSED)
def test_damage_that_is_refused_can_be_undone(
    whole: Path, broken: Path, tmp_path: Path, kind: str
) -> None:
    run = shutil.copytree(broken, tmp_path / "run")
    undo = damage.refuse(run, kind, random.Random(3))
    before = damage.contents(run)
    assert undo is not None and before
    with pytest.raises(UserError):
        simulated(f"{RUN} --resume auto", run)
    assert damage.contents(run) == before
    undo()
    simulated(f"{RUN} --resume auto", run)
    assert difference(whole, run) == ""


def test_a_job_is_judged_by_what_befell_it() -> None:
    assert judge(0, "", set(), True, False) == ""
    assert "did not end" in judge(0, "", {"kill"}, False, False)
    assert "traceback" in judge(1, "Traceback (most recent call last)", {"kill"}, True, False)
    for code, kinds in ((9, set()), (5, {"pause"}), (2, {"kill"}), (3, {"kill"}), (4, {"term"})):
        assert f"ended with {code}" in judge(code, "", kinds, True, False), (code, kinds)
    for code, kinds in ((9, {"kill"}), (5, {"full-disk"}), (75, {"term"}), (2, {"second-job"})):
        assert judge(code, "", kinds, True, False) == ""
    assert judge(4, "", {"freeze"}, True, True) == ""
    assert judge(2, "EXIT STRING: Interrupt (signal 2)", {"int-launcher"}, True, False) == ""
    assert "ended with 2" in judge(2, "bad input", {"int-launcher"}, True, False)
    no_start = "UCX ERROR Failed to write: File too large; MPI_Init_thread(71) failed"
    assert judge(143, no_start, {"full-disk"}, True, False) == ""
    assert "ended with 143" in judge(143, no_start, {"pause"}, True, False)


def test_the_count_goes_on_and_tells_what_was_lost(tmp_path: Path) -> None:
    struck = [{"kind": "kill", "phase": "save"}] * 3
    good = {"seed": 4, "case": 0, "run": "r", "struck": struck, "codes": [9, 0], "lost": ""}
    lost = {**good, "case": 1, "lost": "rank 0 has another state.x"}
    (tmp_path / chaos.LOG).write_text("".join(json.dumps(life) + "\n" for life in (good, lost)))
    options = chaos.Options(faults=6, seed=4, out=tmp_path)
    found = chaos.count(chaos.run(options, "mpirun"))  # all six were made before
    assert found["faults"] == found["tried"]["kill"] == 6 and found["in_lost_runs"] == {"kill": 3}
    assert found["lost"] == ["run 1: rank 0 has another state.x"]
    assert "6 faults against 2 drawn runs" in chaos.text(found) and "1 lost" in chaos.text(found)
    assert chaos.main(options) == 1
    with pytest.raises(UserError, match="of another --seed"):
        chaos.run(chaos.Options(faults=6, seed=5, out=tmp_path), "mpirun")
