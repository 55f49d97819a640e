"""--tau auto and --retune over MPI: one tau on all ranks, the bits of a run that was told it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import export, train
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.training import tau_measure
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from support.simulated_runs import in_memory

SHORT = "--task digits --batchnorm --momentum 0.9 --iterations 24 --eval-every 2 --threads 1"


def trained(words: str, out: Path) -> None:
    argv = [*words.split(), "--out", str(out)]
    train.run(spec.parse(TrainOptions, "train", argv))
    MPI.COMM_WORLD.Barrier()


def test_auto_is_the_run_that_was_told_its_tau(comm: MPI.Comm, shared_path: Path) -> None:
    if comm.size > 4:
        pytest.skip("the same on fewer ranks")
    trained(f"{SHORT} --tau auto:2-4", shared_path / "auto")
    tau = json.loads((shared_path / "auto" / "config.json").read_text())["algorithm"]["tau"]
    assert 2 <= tau <= 4
    trained(f"{SHORT} --tau {tau}", shared_path / "told")
    a, b = (export.newest(shared_path / name, print) for name in ("auto", "told"))
    assert a.manifest["tau"] == tau and a.r == b.r
    assert torch.equal(a.read(comm.rank)["runner"]["x"], b.read(comm.rank)["runner"]["x"])


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("prompt_disk")
@pytest.mark.parametrize(
    "name, late, lag",
    [("oldsgd", "", 1), ("olgt", "", 1), ("oldsgd", "--late reuse --late-wait 60", 2)],
    ids=["oldsgd", "olgt", "oldsgd late"],
)
def test_retuned_together_and_resumed(
    comm: MPI.Comm,
    shared_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    late: str,
    lag: int,
) -> None:
    """Ranks that see different things change tau at the same round, to the same.

    A vote is counted a round later, and another one later where agents may run ahead.
    """
    seen = {3: [1.0, 2.0 + comm.rank], 6: [1.0 + comm.rank, 0.1]}
    monkeypatch.setattr(tau_measure, "_gradient_seconds", lambda training: 1.0)
    monkeypatch.setattr(tau_measure, "_message_seconds", lambda runner, used: (0.1, 0.0))
    rounds: list[int] = []

    def look(retuner: tau_measure.Retuner) -> list[float]:
        rounds.append(retuner.training.runner.r)
        return seen.get(rounds[-1], [1.0, 0.1])

    monkeypatch.setattr(tau_measure.Retuner, "seen", look)
    words = f"{SHORT} --algorithm {name} --checkpoint-every 4 --keep 9 --tau auto --retune 3 {late}"
    trained(words, shared_path / "run")
    assert rounds[:2] == [3, 6]
    slowest = 1.0 + comm.size
    up = {"oldsgd": 1.2 * slowest, "olgt": 2.4 * slowest}[name]
    tau = int(-(-up // 1))
    rows = [json.loads(line) for line in (shared_path / "run" / "metrics.jsonl").open()]
    assert [row["tau"] for row in rows][:3] == [1, 1 if late else tau, tau]

    # The simulator, told to change tau at the same boundaries, ends with the same bits.
    argv = f"{SHORT} --algorithm {name} --tau 1 --agents {comm.size}".split()
    simulation = in_memory(spec.parse(SimulateOptions, "simulate", argv))
    taus = {3 + lag: tau, 6 + lag: 2 * tau // 3}
    simulation.runner.on_round.insert(
        0, lambda r: setattr(r.algorithm, "tau", taus.get(r.r, r.algorithm.tau))
    )
    simulation.run()
    X = simulation.runner.x
    newest = export.newest(shared_path / "run", print)
    assert torch.equal(newest.read(comm.rank)["runner"]["x"], X[comm.rank])

    if late:
        return
    # Resumed where tau had just changed: no calibration, the stored tau.
    branch = f"--resume {shared_path}/run/checkpoints/round-00000004"
    trained(f"{words} {branch}", shared_path / "branch")
    again = export.newest(shared_path / "branch", print)
    assert (
        json.loads((shared_path / "branch" / "config.json").read_text())["algorithm"]["tau"] == tau
    )
    assert torch.equal(again.read(comm.rank)["runner"]["x"], X[comm.rank])


@pytest.mark.ranks(2)
def test_refused_on_all_ranks(comm: MPI.Comm, shared_path: Path) -> None:
    with pytest.raises(UserError, match="ldsgd stands still"):
        trained(f"{SHORT} --tau auto --algorithm ldsgd", shared_path / "a")
    with pytest.raises(UserError, match="--progress auto"):
        trained(f"{SHORT} --tau auto --progress none", shared_path / "b")
