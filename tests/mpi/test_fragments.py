"""Fragments of x and the damped correction over MPI: the simulator's bits, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import OLDSGD, XOLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.transport.late import Late
from hpc_oldsgd.transport.mpi import MpiTransport
from hpc_oldsgd.transport.trace import Trace
from support.memory import count_from_now, tensor_bytes
from support.training_loops import LOOPS, Loop, agent_loop, simulated_loop

TYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(comm: MPI.Comm, loop: Loop, algorithm: Any, graph: str = "ring", **more: Any) -> None:
    wire = more.pop("wire", None)
    known = {"buffers": more["buffers"]} if "buffers" in more else {}
    expected = simulated_loop(comm, loop, algorithm, graph, wire=TYPES[wire], **known)
    history, _, _ = agent_loop(comm, loop, algorithm, graph, wire=wire, **more)
    for t, (x, X) in enumerate(zip(history, expected, strict=True)):
        assert torch.equal(x, X[comm.rank]), f"step {t}"


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=list(LOOPS))
@pytest.mark.parametrize("kind", [OLDSGD, XOLDSGD])
def test_every_training_loop_is_the_simulators(comm: MPI.Comm, loop: Loop, kind: Any) -> None:
    check(comm, loop, kind(tau=5, fragments=3))


@pytest.mark.max_ranks(4)  # the same on more
@pytest.mark.parametrize("wire", [None, "bf16", "fp16"])
@pytest.mark.parametrize("buffers", ["mix", "local"])
def test_running_statistics_and_wires(comm: MPI.Comm, buffers: str, wire: str | None) -> None:
    for algorithm in (OLDSGD(tau=3, fragments=3), XOLDSGD(tau=2, fragments=2)):
        check(comm, Loop("momentum"), algorithm, buffers=buffers, wire=wire)


@pytest.mark.parametrize("graph", ["complete", "one-peer-ring", "torus"])
def test_graphs(comm: MPI.Comm, graph: str) -> None:
    try:
        topology.from_name(graph, comm.size)
    except UserError:
        pytest.skip(f"no {graph} of {comm.size}")
    check(comm, Loop(), OLDSGD(tau=2, fragments=2), graph)


OPTIONS: list[dict[str, Any]] = [
    {"progress": "poll"},
    {"staging": "host"},
    {"progress": "poll", "staging": "direct"},
    {"native": False, "largest_message_bytes": 100},
    {"late": Late(60.0, 1)},
]


@pytest.mark.max_ranks(4)  # the same on more
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_way_messages_move_changes_nothing(comm: MPI.Comm, options: dict[str, Any]) -> None:
    check(comm, Loop("momentum"), OLDSGD(tau=5, fragments=5), **options)


def test_the_gradient_form(comm: MPI.Comm) -> None:
    check(comm, Loop(), OLDSGD(tau=4, fragments=3, form="gradient"), buffers="local")


@pytest.mark.mpi(min_size=2)
def test_a_trace_names_the_fragments(comm: MPI.Comm) -> None:
    trace = Trace(comm.rank)
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), trace=trace)
    runner = Plain(torch.zeros(200), OLDSGD(tau=5, fragments=3), transport, 0.1)
    runner.trace = trace
    runner.start()
    for _ in range(5):
        runner.advance(runner.x)
    runner.finish()
    for track in ("flight", "wait", "mix"):
        named = [event["args"]["fragment"] for event in trace.events if event["cat"] == track]
        assert named[:3] == ["1/3", "2/3", "3/3"], track


@pytest.mark.mpi(min_size=2)
def test_the_transport_holds_one_fragment_of_everybody(comm: MPI.Comm) -> None:
    """Also where the last fragment has a line less than the others, and not a whole one."""
    d, P = 64 * 1024 + 7, 5
    count_from_now()
    for fragments in (1, P):
        x = torch.full((d,), float(comm.rank))
        transport = MpiTransport(comm, topology.from_name("ring", comm.size))
        runner = Plain(x, OLDSGD(tau=P, fragments=fragments), transport, 0.1)
        g = torch.zeros_like(x)
        before = tensor_bytes()
        runner.start()
        for _ in range(3 * P):
            runner.advance(g)
        degree = len(transport.topology.neighbours(comm.rank, 0))
        held = (tensor_bytes() - before) / (4 * d)
        assert held == pytest.approx((degree + 1) / fragments, rel=0.01)
        runner.finish()
