"""The engine of the studies: which runs are missing, how long they take, what is begun anew."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd import simulate
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import reader
from hpc_oldsgd.runs.spec import Spec
from hpc_oldsgd.study import engine, speedup
from hpc_oldsgd.study.cells import Shelf
from support.runs import study_cell as cell


def test_a_run_that_was_measured_less_is_not_done(tmp_path: Path) -> None:
    """And one that was measured enough counts, wherever a coarse one lies."""
    coarse, fine = cell(), cell()
    coarse = dataclasses.replace(coarse, options=dataclasses.replace(coarse.options, eval_every=3))
    engine.run_one(coarse, tmp_path / "a")
    (run,) = reader.read([tmp_path / "a"])
    assert coarse.done(run) and not fine.done(run) and not cell(eval_samples=30).done(run)
    assert engine.unfinished([fine], Shelf([tmp_path])) == [fine]
    engine.run_one(fine, tmp_path / "b")
    assert engine.unfinished([fine, coarse], Shelf([tmp_path])) == []
    found = Shelf([tmp_path]).find(fine)
    assert found is not None and found.path == tmp_path / "b"


@pytest.mark.parametrize("less", [{"eval_every": 3}, {"eval_samples": 10}])
def test_a_run_that_was_cut_short_and_measured_less_begins_anew(
    tmp_path: Path, less: dict[str, int]
) -> None:
    """Its rows would be among those of the study, which says how it measured."""
    path, whole = tmp_path / "run", cell()
    begun = dataclasses.replace(whole.options, iterations=8, out=path, **less)
    simulate.run(Spec(begun, whole.algorithm, whole.task))
    (path / "summary.json").unlink()
    engine.run_one(whole, path)
    engine.run_one(whole, tmp_path / "straight")
    (run,), (expected,) = reader.read([path]), reader.read([tmp_path / "straight"])
    assert whole.done(run) and run.values("test_loss") == expected.values("test_loss")


def test_a_process_that_is_killed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def submit(self, *_: Any) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(BrokenProcessPool())
            return future

        def shutdown(self, **_: Any) -> None: ...

    monkeypatch.setattr(engine, "ProcessPoolExecutor", Broken)
    with pytest.raises(UserError, match="killed, often for want of memory"):
        engine._run_parallel([cell(), cell(seed=1)], 2, tmp_path, engine.Bar(1))


def test_the_estimate_knows_what_measuring_costs() -> None:
    step_s, row_s = engine._seconds(cell(eval_samples=300))
    assert step_s > 0 and row_s > 0


def test_the_estimate_is_made_on_the_run_that_takes_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One agent's gradients, alone, take longer each than those of many in one pass."""
    monkeypatch.setattr(engine, "_seconds", lambda cell: (cell.n / 12, 0.0))
    many = engine.unfinished([cell(agents=1), cell(agents=4)], Shelf([]))
    engine._announce(many, many, speedup.Options(jobs=1))
    assert "60 gradients, 12 measurements, about 20 s" in capsys.readouterr().out


def test_over_mpi_the_first_run_tells_how_long_the_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "_run_mpi", lambda cell, path, launcher: engine.run_one(cell, path))
    engine._run_all([cell(), cell(seed=1)], speedup.Options(mpi=True), tmp_path)
    said = capsys.readouterr().out
    assert re.search(r"the first run took \d+ s: about .* for the others", said)


def test_a_run_that_another_study_has_finished_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.run_one(cell(), tmp_path / "run")
    monkeypatch.setattr(simulate, "run", lambda *_, **__: pytest.fail("it is run again"))
    told: list[int] = []
    engine.run_one(cell(), tmp_path / "run", told.append)
    assert sum(told) == cell().n * cell().iterations


def test_a_dry_run_writes_nothing_though_all_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run_one(cell(), tmp_path / "runs" / cell().folder)
    with pytest.raises(SystemExit) as ended:
        engine.runs([cell()], speedup.Options(dry_run=True), tmp_path)
    assert ended.value.code == 0 and "0 of 1 runs to go" in capsys.readouterr().out


STUDY = """
import subprocess
from hpc_oldsgd.study import engine
job = subprocess.Popen(["sleep", "600"], preexec_fn=engine._terminate_with_parent)
print(job.pid, flush=True)
job.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_job_ends_with_the_study_that_is_killed() -> None:
    words = [sys.executable, "-c", STUDY]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        job = Path("/proc") / study.stdout.readline().strip() / "stat"
        assert job.exists()
        study.kill()
    limit = time.monotonic() + 60
    while job.exists() and job.read_text().split()[2] != "Z":  # dead, if not yet reaped
        assert time.monotonic() < limit, "it goes on alone"
        time.sleep(0.05)
