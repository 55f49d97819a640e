"""The order of work on a device, without one: late_device.py runs it as late as it may.

Every wait of the transport is taken out in turn, and something here must fail.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import hpc_oldsgd
from hpc_oldsgd import Agent, topology
from hpc_oldsgd.algorithms import OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.transport.device import Host, standing_in
from hpc_oldsgd.transport.late import Late
from hpc_oldsgd.transport.late_number import LateNumber
from hpc_oldsgd.transport.mpi import MpiTransport, cuda_probe
from hpc_oldsgd.transport.narrow import Narrow
from hpc_oldsgd.transport.staging import Staging
from support.late_device import LateDevice, Site
from support.small_problems import rows

D, ROUNDS = 203, 4
WAITS = ("wait_event", "synchronize", "query")
TRANSPORT = Path(hpc_oldsgd.__file__).parent / "transport"
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.max_ranks(3)]


def train(comm: MPI.Comm, device: LateDevice | None, **way: Any) -> torch.Tensor:
    """x after a few rounds of an exchange and an average, both under local steps."""
    n, i = comm.size, comm.rank
    if device is not None:
        device.reset_counts()
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    transport.measure_distance = True
    x, mean = rows(n, D)[i].clone(), torch.zeros(D)
    for r in range(ROUNDS):
        flight = transport.exchange(x, r)
        reduction = None if transport.late else transport.all_reduce(x, r)
        for k in range(2):
            x.add_(0.01 * (1 + i) * (r + k))
            transport.computed()
        flight.mix_into(x, snapshot=True)
        if reduction is not None:
            x.add_(reduction.mean(mean), alpha=0.1)
        transport.settle_times(False)
    if device is not None:
        counts = device.counts
        assert counts["spinning waits, training thread"] == 0
        assert transport.progress != "thread" or counts["sleeping waits, training thread"] == 0
        assert counts["training synchronised by a read"] == 0
    transport.drain()
    assert len(transport.records) == ROUNDS * (1 if transport.late else 2)
    assert all(record.exposed >= 0 for record in transport.records)
    x = x.clone() if device is None else device.read(x)
    transport.close()
    return x


def as_on_the_host(**way: Any) -> Callable[[MPI.Comm, LateDevice], None]:
    """The same bits as without a device."""
    expected: list[torch.Tensor] = []

    def check(comm: MPI.Comm, device: LateDevice) -> None:
        if not expected:
            plain = {k: v for k, v in way.items() if k not in ("staging", "progress", "native")}
            with device.executing(), standing_in(Host(torch.device("cpu"))):
                expected.append(train(comm, None, **plain))
        assert torch.equal(train(comm, device, **way), expected[0])

    return check


def the_probe(comm: MPI.Comm, device: LateDevice) -> None:
    assert cuda_probe.arrives(comm, torch.device("cpu"))


def a_kept_message(comm: MPI.Comm, device: LateDevice) -> None:
    staging = Staging(device, copies=False)
    message = torch.zeros(D)
    with device.executing():
        message.copy_(rows(1, D)[0])  # as MPI writes
    kept = staging.keep(message)
    with device.executing():
        message.fill_(-1.0)  # the next one
        assert torch.equal(kept, rows(1, D)[0])
    assert torch.equal(device.read(staging.to_device(kept)), kept)
    staging.stop()


def a_number_read_late(comm: MPI.Comm, device: LateDevice) -> None:
    x = torch.ones(D)
    number = LateNumber(x.sum())
    x.add_(1.0)
    assert number.read() == D
    assert len(device.training.work) == 1  # nobody waited for what came later
    assert device.counts["training synchronised by a read"] == 0


def a_wait_that_counts_from_the_devices_end(comm: MPI.Comm, device: LateDevice) -> None:
    """Rank 0 waits for nobody, and computes until the others' snapshots are there."""
    n, i = comm.size, comm.rank
    late = Late(0.0 if i == 0 else 60.0, 1)
    transport = MpiTransport(comm, topology.from_name("complete", n), staging="host", late=late)
    x = rows(n, D)[i].clone()
    go = [comm.irecv(source=0, tag=1)] if i else []
    for request in go:
        request.wait()
    flight: Any = transport.exchange(x, 0)
    asked: list[Any] = []

    def arrived() -> bool:
        if not asked:  # only now do the others send
            asked.extend(comm.isend(None, dest=j, tag=1) for j in range(1, n))
        return all(edge.end.snapshots for edge in flight.edges)

    if i == 0:
        device.training.hold_until(arrived)
    flight.wait()
    if i == 0:
        arrived()
        MPI.Request.waitall(asked)
    left_out = flight.left_out
    flight.mix_into(x)
    transport.close()
    assert comm.allreduce(left_out) == 0


SCENARIOS: dict[str, Callable[[MPI.Comm, LateDevice], None]] = {
    "host, thread": as_on_the_host(staging="host", progress="thread"),
    "direct, thread": as_on_the_host(staging="direct", progress="thread"),
    "host, poll": as_on_the_host(staging="host", progress="poll"),
    "direct, none": as_on_the_host(staging="direct", progress="none"),
    "python": as_on_the_host(staging="host", progress="thread", native=False),
    "narrow": as_on_the_host(staging="host", wire=Narrow(8)),
    "narrow, late": as_on_the_host(staging="direct", wire=Narrow(8), late=Late(60.0, 1)),
    "late": as_on_the_host(staging="host", late=Late(60.0, 1)),
    "late, direct": as_on_the_host(staging="direct", late=Late(60.0, 1)),
    "late, poll": as_on_the_host(staging="host", late=Late(60.0, 1), progress="poll"),
    "probe": the_probe,
    "a late message": a_kept_message,
    "a number": a_number_read_late,
    # Last: a rank that fails here in the middle would leave the others waiting.
    "late wait": a_wait_that_counts_from_the_devices_end,
}


def fails(comm: MPI.Comm, name: str, ignore: Site | None, seen: set[Site]) -> bool:
    """Whether it does on any rank."""
    failed = False
    with LateDevice() as device:
        device.ignore = ignore
        try:
            SCENARIOS[name](comm, device)
        except AssertionError:
            failed = True
            if ignore is None:
                raise
        seen |= device.sites
    if ignore is None:
        assert device.freed_early == []
    return bool(comm.allreduce(failed, MPI.LOR))


def waits() -> set[Site]:
    """Every line of the transport that waits for a device."""
    found = set()
    for path in TRANSPORT.rglob("*.py"):
        if path.name == "device.py":  # hands them on
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WAITS:
                found.add((path.name, node.lineno))
    return found


@pytest.mark.max_ranks(2)
def test_every_wait_is_needed(comm):
    """Each is taken out in turn."""
    by_scenario: dict[str, set[Site]] = {}
    for name in SCENARIOS:
        seen: set[Site] = set()
        assert not fails(comm, name, None, seen)
        by_scenario[name] = {site for part in comm.allgather(seen) for site in part}
    assert set().union(*by_scenario.values()) == waits()
    for site in sorted(waits()):
        tried = [name for name in SCENARIOS if site in by_scenario[name]]
        assert any(fails(comm, name, site, set()) for name in tried), site


def test_memory_is_kept_until_the_side_stream_has_read_it(comm):
    """torch's allocator gives it away as soon as nobody holds it."""
    with LateDevice() as device:
        staging = Staging(device, copies=True)
        for held in (True, False):
            y = rows(1, D)[0].clone()
            departure = staging.depart([(staging.host(y), y)])
            if held:
                departure.copied.synchronize()
            del y
            assert (device.freed_early == []) is held
        staging.stop()


WAITED = ("spinning waits", "sleeping waits", "stream synchronisations", "device synchronisations")


def no_stall(device: LateDevice) -> bool:
    """The training thread has waited for nothing of its device."""
    kinds = [f"{kind}, training thread" for kind in WAITED]
    return not any(device.counts[k] for k in (*kinds, "training synchronised by a read"))


@pytest.mark.parametrize("staging", ["host", "direct"])
def test_what_a_round_costs(comm, staging):
    """As docs/mixing-op.md states it: one kernel, no stall, copies only where MPI needs them."""
    graph = topology.from_name("ring", comm.size)
    degree = len(graph.neighbours(comm.rank))
    with LateDevice() as device:
        transport = MpiTransport(comm, graph, staging=staging, progress="thread")
        transport.measure_distance = True
        x = rows(comm.size, D)[comm.rank].clone()
        for r in range(3):
            flight = transport.exchange(x, r)
            device.reset_counts() if r == 1 else None
            x.add_(1.0)  # a local step
            flight.mix_into(x, snapshot=True)
        flight = transport.exchange(x, 3)
        flight.wait()
        # Two rounds, from one departure to the one after the next.
        assert device.launches == {
            ("training", "add_"): 2, ("training", "fused_mix_delta"): 2
        }  # fmt: skip
        copies = 2 if staging == "host" else 0
        assert device.counts["copies to the host"] == copies
        assert device.counts["copies to the device"] == degree * 3 * copies // 2
        assert no_stall(device)
        transport.close()


def test_an_agent_never_stalls_its_device(comm):
    """Nor does a loss that is read late; the same model as on the host."""

    def train_on(device: LateDevice | None) -> torch.Tensor:
        torch.manual_seed(1 + comm.rank)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        way = {"staging": "host"} if device else {}
        agent = Agent(model, optimizer, OLDSGD(tau=2), "ring", comm, sync=False, **way)
        losses = []
        for k in range(8):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).square().mean()
            loss.backward()
            losses.append(LateNumber(loss))
            if device is not None:
                device.reset_counts()
            agent.step()
            # The first step looks once whether the optimizer keeps memory that the model has left.
            assert device is None or k == 0 or no_stall(device), device.counts
        assert all(loss.read() > 0 for loss in losses)
        x = agent.x.clone() if device is None else device.read(agent.x)
        agent.finish()
        return x

    expected = train_on(None)
    with LateDevice() as device:
        assert torch.equal(train_on(device), expected)


@pytest.mark.parametrize("seed", range(3))
def test_streams_with_threads_of_their_own(comm, seed):
    """As a GPU runs them: whenever it likes."""
    for name in ("host, thread", "late, poll"):
        with LateDevice(seed=seed) as device:
            SCENARIOS[name](comm, device)


@pytest.mark.parametrize("progress", ["poll", "none"])
def test_a_snapshot_leaves_while_the_agent_waits_for_something_else(comm, progress):
    """Rank 0 votes after its flight, the others before: they must send on the way."""
    graph = topology.from_name("complete", comm.size)
    with LateDevice():
        transport = MpiTransport(comm, graph, staging="host", progress=progress, timeout_s=10.0)
        flight = transport.exchange(rows(comm.size, D)[comm.rank], 0)
        for wait in [flight.wait, transport.barrier][:: 1 if comm.rank == 0 else -1]:
            wait()
        transport.close()


def test_every_thread_that_meets_device_memory_has_its_device(comm):
    with LateDevice() as device:
        train(comm, device, staging="host", progress="thread", native=False)
        train(comm, device, staging="direct", late=Late(60.0, 1))
    started = {name.rstrip("0123456789_") for name in device.current_in}
    assert started == {"staging", "progress"}


def test_a_host_that_runs_ahead_is_not_taken_for_a_device_that_waits(comm):
    """The wait of the host is long; the device has computed meanwhile."""
    with LateDevice() as device:
        transport = MpiTransport(comm, topology.from_name("ring", comm.size), staging="host")
        x = rows(comm.size, D)[comm.rank].clone()
        flight = transport.exchange(x, 0)
        device.training.hold_until(flight.done)  # a long step, until the messages are there
        flight.mix_into(x)
        transport.drain()
        (record,) = transport.records
        assert record.exposed < 0.1 and record.posted <= record.completed
        transport.close()


def test_messages_cannot_leave_from_inside_a_cuda_graph(comm):
    with LateDevice() as device:
        transport = MpiTransport(comm, topology.from_name("ring", comm.size), staging="host")
        device.in_capture = True
        for send in (transport.exchange, transport.all_reduce):
            with pytest.raises(UserError, match="inside a CUDA graph"):
                send(torch.zeros(D), 0)
        transport.close()
