"""--auto, --tau auto and --retune over MPI: one plan on all ranks, the bits of a run told it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import OLDSGD, Agent, export, make_plan, train
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.runtime.runner import Runner
from hpc_oldsgd.training import measure, retune
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from hpc_oldsgd.training.plan import Message
from hpc_oldsgd.transport.base import Transport
from support.runs import in_memory

SHORT = "--task digits --batchnorm --momentum 0.9 --iterations 24 --eval-every 2 --threads 1"


def told(transport: Transport, x: torch.Tensor) -> Message:
    transport.close()
    return Message(0.1)


def trained(words: str, out: Path) -> None:
    argv = [*words.split(), "--out", str(out)]
    train.run(spec.parse(TrainOptions, "train", argv))
    MPI.COMM_WORLD.Barrier()


@pytest.mark.parametrize("fragments", ["1", "auto"])
def test_auto_is_the_run_that_was_told_its_tau(
    comm: MPI.Comm, mpi_tmp_path: Path, fragments: str
) -> None:
    if comm.size > 4:
        pytest.skip("the same on fewer ranks")
    trained(f"{SHORT} --tau auto:2-4 --fragments {fragments}", mpi_tmp_path / "auto")
    known = json.loads((mpi_tmp_path / "auto" / "config.json").read_text())["algorithm"]
    tau, P = known["tau"], known["fragments"]
    assert 2 <= tau <= 4 and 1 <= P <= tau
    trained(f"{SHORT} --tau {tau} --fragments {P}", mpi_tmp_path / "told")
    a, b = (export.newest(mpi_tmp_path / name, print) for name in ("auto", "told"))
    assert a.manifest["tau"] == tau and a.r == b.r
    assert torch.equal(a.read(comm.rank)["runner"]["x"], b.read(comm.rank)["runner"]["x"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(3)
def test_a_plan_is_measured_kept_and_given_back(comm: MPI.Comm, mpi_tmp_path: Path) -> None:
    """Ranks that measured different things have one plan, and it repeats the run bit for bit."""
    first, again = mpi_tmp_path / "first", mpi_tmp_path / "again"
    auto = "--auto graph=ring|one-peer-exponential,wire=fp32|int4,tau=2-4"
    trained(f"{SHORT} {auto}", first)
    plan = json.loads((first / "config.json").read_text())["plan"]
    graphs = spec.make_graphs(spec.parse(TrainOptions, "t", auto.split()).options, comm.size)
    known = {f"{graph} {wire}" for graph in graphs for wire in ("fp32", "int4")}
    assert set(plan["measured"]["messages"]) == known and plan["measured"]["gradient"] > 0
    assert all(told["seconds"] > 0 for told in plan["measured"]["messages"].values())
    assert 2 <= plan["tau"] <= 4 and plan["agents"] == comm.size
    trained(f"{SHORT} --plan {first}", again)
    a, b = (export.newest(folder, print) for folder in (first, again))
    x = b.read(comm.rank)["runner"]["x"]
    assert torch.equal(a.read(comm.rank)["runner"]["x"], x)
    assert json.loads((again / "config.json").read_text())["plan"] == plan
    # Resumed: no new measurement, the plan of the run.
    trained(f"{SHORT} {auto} --iterations 32 --resume auto", first)
    assert json.loads((first / "config.json").read_text())["plan"] == plan


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(4)
def test_a_plan_for_ones_own_loop(comm: MPI.Comm) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    plan = make_plan(model, lambda k: model(torch.ones(2, 40)).sum().backward(), auto="tau=1-2")
    told = comm.allgather(plan)
    assert told.count(plan) == comm.size and plan.model == "1640 float32"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Agent(model, optimizer, plan.apply(OLDSGD()), plan.topology, wire=plan.wire) as agent:
        for _ in range(plan.tau):
            model(torch.ones(2, 40)).sum().backward()
            agent.step()
        assert agent.r == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("progress", ["auto", "poll"])
@pytest.mark.parametrize("name", ["oldsgd", "xoldsgd", "kgt", "olgt", "cocod"])
def test_a_trial_leaves_no_trace(comm: MPI.Comm, name: str, progress: str) -> None:
    """All ranks have tried the same plans, and the model, its buffers and random numbers stay."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    random, called = torch.get_rng_state(), set[int]()

    def gradient(k: int) -> None:
        called.add(k)
        model(torch.randn(8, 40)).sum().backward()

    plan = make_plan(model, gradient, name, auto="graph=ring,wire=fp32|int4", progress=progress)
    assert comm.allgather(plan).count(plan) == comm.size
    assert all(one["step"] > 0 for one in plan.measured["tried"]) and plan.measured["tried"]
    cell = (plan.topology, plan.wire, plan.tau, plan.fragments)
    keys = ("topology", "wire", "tau", "fragments")
    assert cell in [tuple(one[key] for key in keys) for one in plan.measured["tried"]]
    assert called == set(range(11))
    assert all(torch.equal(before[key], now) for key, now in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(4)
@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize(
    "name, more, lag",
    [
        ("oldsgd", "", 1),
        ("oldsgd", "--fragments auto", 1),
        ("olgt", "", 1),
        ("oldsgd", "--late reuse --late-wait 60", 2),
    ],
    ids=["oldsgd", "oldsgd in fragments", "olgt", "oldsgd late"],
)
def test_retuned_together_and_resumed(
    comm: MPI.Comm,
    mpi_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    more: str,
    lag: int,
) -> None:
    """Ranks that see different things change tau at the same round, to the same.

    A vote is counted a round later, and another one later where agents may run ahead.
    """
    seen = {3: [1.0, 2.0 + comm.rank], 6: [1.0 + comm.rank, 0.1]}
    monkeypatch.setattr(measure, "gradient_seconds", lambda *given: (1.0, 0.0))
    monkeypatch.setattr(measure, "message_seconds", told)
    rounds: list[int] = []

    def look(retuner: retune.Retuner) -> list[float]:
        rounds.append(retuner.training.runner.r)
        return seen.get(rounds[-1], [1.0, 0.1])

    monkeypatch.setattr(retune.Retuner, "seen", look)
    words = f"{SHORT} --algorithm {name} --checkpoint-every 4 --keep 9 --tau auto --retune 3 {more}"
    trained(words, mpi_tmp_path / "run")
    assert rounds[:2] == [3, 6]
    slowest = 1.0 + comm.size
    up = {"oldsgd": 1.2 * slowest, "olgt": 2.4 * slowest}[name]
    tau = int(-(-up // 1))
    rows = [json.loads(line) for line in (mpi_tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["tau"] for row in rows][:3] == [1, 1 if lag > 1 else tau, tau]

    # The simulator, told to change tau at the same boundaries, ends with the same bits.
    argv = f"{SHORT} --algorithm {name} --tau 1 --agents {comm.size}".split()
    simulation = in_memory(spec.parse(SimulateOptions, "simulate", argv))
    taus = {3 + lag: tau, 6 + lag: 2 * tau // 3}

    def change(runner: Runner) -> None:
        runner.algorithm.tau = taus.get(runner.r, runner.algorithm.tau)
        if "fragments" in more:  # one step long at the start, and so they stay
            runner.algorithm.fragments = runner.algorithm.tau  # type: ignore[attr-defined]

    simulation.runner.on_round.insert(0, change)
    simulation.run()
    X = simulation.runner.x
    newest = export.newest(mpi_tmp_path / "run", print)
    assert torch.equal(newest.read(comm.rank)["runner"]["x"], X[comm.rank])

    if lag > 1:
        return
    # Resumed where tau had just changed: no calibration, the stored tau and fragments.
    branch = f"--resume {mpi_tmp_path}/run/checkpoints/round-00000004"
    trained(f"{words} {branch}", mpi_tmp_path / "branch")
    again = export.newest(mpi_tmp_path / "branch", print)
    assert (
        json.loads((mpi_tmp_path / "branch" / "config.json").read_text())["algorithm"]["tau"] == tau
    )
    assert torch.equal(again.read(comm.rank)["runner"]["x"], X[comm.rank])


@pytest.mark.mpi(min_size=2)
def test_refused_on_all_ranks(comm: MPI.Comm, mpi_tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ldsgd stands still"):
        trained(f"{SHORT} --tau auto --algorithm ldsgd", mpi_tmp_path / "a")
    with pytest.raises(UserError, match="--progress auto"):
        trained(f"{SHORT} --tau auto --progress none", mpi_tmp_path / "b")
