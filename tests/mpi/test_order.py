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
from hpc_oldsgd import topology
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.transport.device import Host, standing_in
from hpc_oldsgd.transport.late import Late
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
    "late": as_on_the_host(staging="host", late=Late(60.0, 1)),
    "late, direct": as_on_the_host(staging="direct", late=Late(60.0, 1)),
    "late, poll": as_on_the_host(staging="host", late=Late(60.0, 1), progress="poll"),
    "probe": the_probe,
    "a late message": a_kept_message,
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
