"""Runs of hpc_oldsgd.train that stop and go on, and that equal the simulator's, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import algorithms, export, simulate, train
from hpc_oldsgd.checkpoints.store import newest_first
from hpc_oldsgd.errors import Stopped, UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.runs.spec import Spec
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from hpc_oldsgd.training.signals import Inbox
from support.simulated_runs import same

WALL = {"time", "step_s", "samples_per_s", "transfer", "exposed", "hidden", "eval_s"}
SHORT = "--task logistic --iterations 24 --tau 2 --eval-every 3 --checkpoint-every 2"
NAMES = algorithms.names() if MPI.COMM_WORLD.size == 3 else ["oldsgd"]


class AskOnce(Inbox):
    """The signal of one rank, at its k-th boundary."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.left = k

    def take(self) -> set[str]:
        self.left -= 1
        return {"stop"} if self.left == 0 else set()


def parse(kind: type, words: str, out: Path) -> Spec[Any]:
    return spec.parse(kind, "test", [*words.split(), "--out", str(out)])


def trained(words: str, out: Path, signals: Inbox | None = None) -> None:
    train.run(parse(TrainOptions, f"--threads 1 {words}", out), signals)


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in WALL} for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_stopped_by_one_rank_and_resumed(comm: MPI.Comm, shared_path: Path, name: str) -> None:
    optimizer = ["", "--momentum 0.9", "--optimizer adamw"][algorithms.names().index(name) % 3]
    words = f"{SHORT} --algorithm {name} {optimizer}"
    if name.startswith("dsgd"):
        words = words.replace("--tau 2 ", "")
    trained(words, shared_path / "whole")
    last_rank = comm.rank == comm.size - 1
    with pytest.raises(Stopped):
        trained(words, shared_path / "cut", AskOnce(5) if last_rank else None)
    comm.Barrier()
    assert newest_first(shared_path / "cut")[0].name == "round-00000006"
    trained(f"{words} --resume auto", shared_path / "cut")
    comm.Barrier()
    a, b = (export.newest(shared_path / run, print) for run in ("whole", "cut"))
    assert a.r == b.r and same(a.read(comm.rank)["runner"], b.read(comm.rank)["runner"])
    assert rows_of(shared_path / "whole") == rows_of(shared_path / "cut")


@pytest.mark.parametrize("name", ["oldsgd", "overlap_local_sgd"])
def test_from_the_start(comm: MPI.Comm, shared_path: Path, name: str) -> None:
    words = f"{SHORT} --algorithm {name} --keep 99"
    trained(words, shared_path / "run")
    comm.Barrier()
    start = newest_first(shared_path / "run")[-1]
    assert start.name == "round-00000000"
    trained(f"{words} --resume {start}", shared_path / "branch")
    comm.Barrier()
    a, b = (export.newest(shared_path / run, print) for run in ("run", "branch"))
    assert a.r == b.r and same(a.read(comm.rank)["runner"], b.read(comm.rank)["runner"])
    assert rows_of(shared_path / "run") == rows_of(shared_path / "branch")


@pytest.mark.ranks(2)
def test_votes_lag_where_agents_may_run_ahead(comm: MPI.Comm, shared_path: Path) -> None:
    """With --late reuse a vote is counted staleness + 1 rounds later, by all in the same round."""
    patient = f"{SHORT} --late reuse --late-wait 1000 --staleness 2"
    trained(SHORT, shared_path / "whole")
    with pytest.raises(Stopped):
        trained(patient, shared_path / "cut", AskOnce(3) if comm.rank == 1 else None)
    comm.Barrier()
    assert newest_first(shared_path / "cut")[0].name == "round-00000006"
    trained(f"{patient} --resume auto", shared_path / "cut")
    hasty = f"{SHORT} --late reuse --late-wait 0 --staleness 2 --slow 1:4 --jitter 0.5"
    trained(hasty, shared_path / "hasty")
    comm.Barrier()
    a, b = (export.newest(shared_path / run, print) for run in ("whole", "cut"))
    assert a.r == b.r and same(a.read(comm.rank)["runner"], b.read(comm.rank)["runner"])
    assert rows_of(shared_path / "whole") == rows_of(shared_path / "cut")
    left_out = [row["left_out"] for row in rows_of(shared_path / "hasty")]
    assert max(left_out) > 0 and rows_of(shared_path / "hasty")[-1]["round"] == 12


def test_train_is_simulate_bit_for_bit(comm: MPI.Comm, shared_path: Path) -> None:
    if comm.size > 4:
        pytest.skip("the same on fewer ranks")
    words = "--task digits --batchnorm --momentum 0.9 --iterations 12 --tau 3 --partition label:0.7"
    trained(words, shared_path / "mpi")
    comm.Barrier()
    if comm.rank == 0:
        simulate.run(
            parse(SimulateOptions, f"{words} --agents {comm.size}", shared_path / "stacked")
        )
    comm.Barrier()
    mine = export.newest(shared_path / "mpi", print).read(comm.rank)
    theirs = export.newest(shared_path / "stacked", print).read(0)
    assert torch.equal(mine["runner"]["x"], theirs["runner"]["x"][comm.rank])
    assert same(mine["runner"]["optimizer"], theirs["runner"]["optimizers"][comm.rank])
    for a, b in zip(rows_of(shared_path / "mpi"), rows_of(shared_path / "stacked"), strict=True):
        assert a["agent_loss"] == b["agent_loss"] and a["test_accuracy"] == pytest.approx(
            b["test_accuracy"]
        )
        assert a["consensus"] == pytest.approx(b["consensus"], rel=1e-5, abs=1e-12)


@pytest.mark.ranks(2)
def test_a_shard_damaged_on_one_rank(
    comm: MPI.Comm, shared_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(SHORT, shared_path / "run")
    comm.Barrier()
    newest, before = newest_first(shared_path / "run")
    comm.Barrier()
    if comm.rank == 1:
        with (newest / "rank-00001.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
    comm.Barrier()
    capfd.readouterr()
    trained(f"{SHORT} --resume auto", shared_path / "run")
    said = capfd.readouterr().err
    if comm.rank == 0:
        damaged = "rank 1: the checksum of rank-00001.safetensors is wrong"
        assert f"{newest.name} is not usable ({damaged}): trying the one before" in said
        assert f"goes on from round {int(before.name[6:])}" in said
    comm.Barrier()
    assert export.newest(shared_path / "run", print).folder == newest


@pytest.mark.ranks(2)
def test_the_exported_mean_is_what_the_run_measured(comm: MPI.Comm, shared_path: Path) -> None:
    trained("--batchnorm --iterations 10 --alpha 0.05", shared_path / "run")
    comm.Barrier()
    if comm.rank == 0:
        out = shared_path / "model.safetensors"
        export.main(export.Options(run=shared_path / "run", out=out))
        task, _ = export.task_of(shared_path / "run")
        model = task.model()
        model.load_state_dict(export.load_file(out))
        summary = json.loads((shared_path / "run" / "summary.json").read_text())
        numbers = task.evaluate(model)
        assert numbers["test_accuracy"] == pytest.approx(summary["test_accuracy"], abs=1e-9)
        assert numbers["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-5)


@pytest.mark.ranks(2)
def test_wrong_options_end_on_all_ranks(comm: MPI.Comm, shared_path: Path) -> None:
    with pytest.raises(UserError, match="torus"):
        trained("--task logistic --topology torus:7x9", shared_path / "a")
    with pytest.raises(UserError, match="there is no such folder"):
        trained(f"--resume {shared_path}/none", shared_path / "b")
    (shared_path / "c").mkdir(exist_ok=True)
    (shared_path / "c" / "thesis.tex").touch()
    with pytest.raises(UserError, match="something else than a run"):
        trained("--task logistic", shared_path / "c")
