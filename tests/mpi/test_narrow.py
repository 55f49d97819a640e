"""The difference wire over MPI: the simulator's bits, few bytes, and copies equal at both ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import export, topology
from hpc_oldsgd.algorithms import (
    KGT,
    LDSGD,
    LED,
    LUGT,
    MOLDSGD,
    OLDSGD,
    OLED,
    OLGT,
    XOLDSGD,
    NoLoCo,
)
from hpc_oldsgd.errors import Stopped
from hpc_oldsgd.runtime.agent import Agent
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.transport.late import Late
from hpc_oldsgd.transport.mpi import MpiTransport
from hpc_oldsgd.transport.narrow import Narrow
from support.bits import same
from support.faults import AskOnce
from support.narrow_copies import copies_agree
from support.runs import WALL_MPI, rows_of, simulated, trained
from support.small_problems import OPTIMIZERS, backward, cnn, rows
from support.training_loops import Loop, agent_loop, simulated_loop

ALGORITHMS = [
    OLDSGD(tau=3), OLDSGD(tau=5, fragments=5), XOLDSGD(tau=3, fragments=2), LDSGD(tau=2),
    KGT(tau=2), LUGT(tau=2), LED(tau=2), OLED(tau=3), OLGT(tau=2), OLGT(tau=1), NoLoCo(tau=2),
    MOLDSGD(tau=3, fragments=3),
]  # fmt: skip


def check(comm: MPI.Comm, algorithm: Any, bits: int, graph: str = "ring", **more: Any) -> None:
    known = {"buffers": more["buffers"]} if "buffers" in more else {}
    loop = Loop("momentum")
    expected = simulated_loop(comm, loop, algorithm, graph, wire=Narrow(bits), **known)
    history, _, _ = agent_loop(comm, loop, algorithm, graph, wire=f"int{bits}", **more)
    for t, (x, X) in enumerate(zip(history, expected, strict=True)):
        assert torch.equal(x, X[comm.rank]), f"step {t}"


if MPI.COMM_WORLD.size != 3:
    ALGORITHMS = ALGORITHMS[1:5:3]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_every_algorithm_is_the_simulators(comm: MPI.Comm, algorithm: Any) -> None:
    """Of a model with BatchNorm, whose statistics travel in full."""
    check(comm, algorithm, 4 if algorithm.tau == 3 else 8)


OPTIONS: list[dict[str, Any]] = [
    {"progress": "poll"},
    {"staging": "host", "largest_message_bytes": 100},
    {"native": False, "graph": "one-peer-ring"},
    {"late": Late(60.0, 1), "graph": "one-peer-ring"},
    {"late": Late(60.0, 1), "staging": "host", "buffers": "local"},
]


@pytest.mark.max_ranks(4)  # the same on more
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_way_messages_move_changes_nothing(comm: MPI.Comm, options: dict[str, Any]) -> None:
    for algorithm in (OLDSGD(tau=2), OLDSGD(tau=3, fragments=3)):
        check(comm, algorithm, 4, **options)


class Tail:
    """The last 10 of 100 numbers are averages of which half fades."""

    start = 90

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x.view(-1, 100)[0]
        self._agents = x.numel() // 100

    def passes(self) -> torch.Tensor:
        return torch.zeros(self._agents)

    def left(self, since: torch.Tensor) -> torch.Tensor:
        return torch.full((self._agents, 10), 0.5)


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(3)
def test_the_distance_counts_running_statistics(comm: MPI.Comm) -> None:
    graph, X = topology.from_name("ring", comm.size), rows(comm.size, 100)
    x = X[comm.rank].clone()
    told = []
    mpi = MpiTransport(comm, graph, wire=Narrow(8))
    for transport, own in ((mpi, x), (StackedTransport(graph, wire=Narrow(8)), X)):
        transport.model, transport.tail, transport.measure_distance = own, Tail(own), True
        found = []
        for r in range(3):  # the first message is whole
            transport.exchange(own, r).mix_into(own)
            assert transport.distance is not None
            found.append(torch.as_tensor(transport.distance).reshape(-1).clone())
        told.append(found)
    mpi.close()
    for ours, theirs in zip(*told, strict=True):
        assert ours.item() == pytest.approx(float(theirs[comm.rank]), rel=1e-9)
    assert same(x, X[comm.rank])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("graph", ["ring", "one-peer-ring"])
def test_late_differences_reach_the_copies_in_order(comm: MPI.Comm, graph: str) -> None:
    n, i, d = comm.size, comm.rank, 1003
    transport = MpiTransport(comm, topology.from_name(graph, n), late=Late(5e-4, 2), wire=Narrow(4))
    x = rows(n, d, torch.float64)[i].clone()
    transport.model = x
    before = comm.allreduce(x.numpy(), MPI.SUM)
    random = np.random.default_rng(i)
    pauses, out = np.where(random.random(40) < 0.15, 0.02, 5e-4), 0
    for r in range(40):
        flight = transport.exchange(x, r)
        time.sleep(pauses[r])
        transport.computed()
        flight.mix_into(x)
        out += transport.records[-1].left_out
    assert comm.allreduce(out) > 0
    np.testing.assert_allclose(comm.allreduce(x.numpy(), MPI.SUM), before, atol=1e-11)
    transport.exchange(x, 40)  # dropped with the rest
    transport.drain()
    copies_agree(comm, transport)
    transport.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("bits", "most"), [(8, 0.27), (4, 0.14)])
def test_bytes_of_the_requests(comm: MPI.Comm, bits: int, most: float) -> None:
    """Those of every round but the first, counted from what is given to MPI."""
    d, P = 40_000, 2
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), wire=Narrow(bits))
    sizes: list[int] = []
    init = transport.comm.Send_init

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def Send_init(self, buffer: Any, *to: Any) -> Any:
            sizes.append(buffer[0].nbytes)
            return init(buffer, *to)

    real, transport.comm = transport.comm, Counting()  # type: ignore[assignment]
    runner = Plain(torch.randn(d), OLDSGD(tau=2, fragments=P), transport, 0.1)
    runner.start()
    while runner.r < 4:
        runner.advance(torch.randn(d))
    transport.comm = real
    degree = len(transport.topology.neighbours(comm.rank))
    whole = sorted(sizes)[-P * degree :]
    narrow = sorted(sizes)[: -P * degree]
    assert sum(whole) == degree * d * 4
    assert len(narrow) == degree  # made once, for all fragments
    assert all(size * P <= most * d * 4 for size in narrow)
    runner.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_of_the_model(comm: MPI.Comm, dtype: torch.dtype) -> None:
    n, d = comm.size, 500
    graph = topology.from_name("ring", n)
    X = rows(n, d, dtype)
    x = X[comm.rank].clone()
    stacked = Plain(X, OLDSGD(tau=1), StackedTransport(graph, wire=Narrow(4)), 0.01)
    own = Plain(x, OLDSGD(tau=1), MpiTransport(comm, graph, wire=Narrow(4)), 0.01)
    for runner, g in ((stacked, X), (own, x)):
        runner.start()
        for _ in range(6):
            runner.advance(g.clone())
    assert torch.equal(x, X[comm.rank])
    own.finish()


def test_norms_of_another_type_travel_beside(comm: MPI.Comm) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm, wire="int8") as agent:
        for k in range(8):
            torch.manual_seed(k * comm.size + comm.rank)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            agent.step()
        assert torch.isfinite(agent.mean()).all()
        agent.transport.drain()
        if comm.size > 1:
            copies_agree(comm, agent.transport)
        agent.others.drop()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", [OLDSGD(tau=2), KGT(tau=2)], ids=str)
def test_an_agents_state_goes_on_bit_for_bit(
    comm: MPI.Comm, mpi_tmp_path: Path, algorithm: Any
) -> None:
    """Taken after the step, when the next message has left; also with a hook, which might change x
    and so keeps the pass that mixes from encoding it."""

    def make(hook: bool) -> tuple[Any, Any, Agent]:
        model = cnn(comm.rank)
        optimizer = OPTIMIZERS["momentum"]([p for p in model.parameters() if p.requires_grad])
        agent = Agent(model, optimizer, algorithm, "ring", comm, wire="int4", sync=True)
        if hook:
            agent.on_round.append(lambda _: None)
        return model, optimizer, agent

    for hook in (False, True):
        model, optimizer, agent = make(hook)
        for k in range(10):
            optimizer.zero_grad()
            backward(model, comm.rank, k)
            agent.step()
            if agent.t == 4:
                agent.save(mpi_tmp_path / str(hook))
        last = agent.x.clone()
        agent.finish()
        model, optimizer, agent = make(hook)
        agent.load(mpi_tmp_path / str(hook))
        for k in range(4, 10):
            optimizer.zero_grad()
            backward(model, comm.rank, k)
            agent.step()
        assert torch.equal(agent.x, last), hook
        agent.finish()


SHORT = "--task logistic --iterations 24 --tau 2 --eval-every 3 --checkpoint-every 2 --wire int4"


@pytest.mark.max_ranks(3)
@pytest.mark.parametrize("name", ["oldsgd", "kgt"] if MPI.COMM_WORLD.size == 3 else ["oldsgd"])
def test_a_run_stopped_and_resumed(comm: MPI.Comm, mpi_tmp_path: Path, name: str) -> None:
    words = f"{SHORT} --algorithm {name}" + " --fragments 2" * (comm.size == 2)
    trained(words, mpi_tmp_path / "whole")
    with pytest.raises(Stopped):
        trained(words, mpi_tmp_path / "cut", AskOnce(5) if comm.rank == 0 else None)
    trained(f"{words} --resume auto", mpi_tmp_path / "cut")
    comm.Barrier()
    a, b = (export.newest(mpi_tmp_path / run, print) for run in ("whole", "cut"))
    assert a.r == b.r and same(a.read(comm.rank)["runner"], b.read(comm.rank)["runner"])
    assert set(a.read(comm.rank)["runner"]["streams"]) > set()
    assert rows_of(mpi_tmp_path / "whole", WALL_MPI) == rows_of(mpi_tmp_path / "cut", WALL_MPI)
    if comm.rank == 0:
        simulated(f"{words} --agents {comm.size}", mpi_tmp_path / "simulated")
        x = export.newest(mpi_tmp_path / "simulated", print).read(0)["runner"]["x"]
        assert torch.equal(a.read(0)["runner"]["x"], x[0])
