"""Differences over MPI with neighbours left out: what a checkpoint brings back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import KGT, OLDSGD
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.transport.late import Late
from hpc_oldsgd.transport.mpi import MpiTransport
from hpc_oldsgd.transport.narrow import Narrow
from support.bits import same
from support.narrow_copies import copies_agree
from support.small_problems import quadratic, rows

D, SAVED, END = 700, 5, 12
LATE_IN = {3, 4, 7, 10, 11}  # round 5 is the first after the checkpoint


class Script:
    """Rank 0 sends nothing in the rounds of LATE_IN before rank 1 has gone on without it.

    So which messages are late is the same in every run.
    """

    def __init__(self, comm: MPI.Comm, transport: MpiTransport, first: int = 0) -> None:
        self.comm, self.transport, self.first = comm, transport, first
        self.x: dict[int, torch.Tensor] = {}
        self.left_out: dict[int, float] = {}

    def boundary(self, runner: Plain) -> None:
        r, rank = runner.r, self.comm.rank
        self.x[r] = runner.x.clone()
        if self.transport.records:
            self.left_out[r] = self.transport.records[-1].left_out
        if rank == 1 and r - 1 in LATE_IN and r > self.first:
            self.comm.Barrier()
        self.transport.late = Late(0.0 if rank == 1 and r in LATE_IN else 60.0, 2)
        if rank == 0 and r in LATE_IN and r < END:
            self.comm.Barrier()
        if r == END:
            runner.stop()


def go(comm: MPI.Comm, runner: Plain) -> None:
    grad = quadratic(comm.size, D, np.float32)
    while not runner.finished:
        g = grad(comm.rank, runner.x.numpy(), runner.t)
        runner.advance(torch.from_numpy(g))


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {k: copied(v) for k, v in state.items()} if isinstance(state, dict) else state


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(2)
@pytest.mark.parametrize(
    "algorithm", [OLDSGD(tau=2), OLDSGD(tau=2, fragments=2), KGT(tau=2)], ids=str
)
@pytest.mark.parametrize("bits", [8, 4])
def test_with_the_same_lateness_it_is_the_same_run(
    comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch, algorithm: Any, bits: int
) -> None:
    """Saved while a difference is late at one end. Nobody is late in the round after it: there a
    resumed run sends whole copies, which everybody waits for."""

    def make() -> Plain:
        graph = topology.from_name("ring", comm.size)
        transport = MpiTransport(comm, graph, late=Late(60.0, 2), wire=Narrow(bits))
        return Plain(rows(comm.size, D)[comm.rank].clone(), algorithm, transport, 0.05)

    saved: list[dict[str, Any]] = []
    whole = make()
    assert isinstance(whole.transport, MpiTransport)
    script = Script(comm, whole.transport)
    whole.observers.append(
        lambda runner: saved.append(copied(runner.state_dict())) if runner.r == SAVED else None
    )
    whole.observers.append(script.boundary)
    whole.start()
    go(comm, whole)
    assert [r - 1 for r, out in script.left_out.items() if out] == sorted(LATE_IN)
    whole.finish()

    again = make()
    transport = again.transport
    assert isinstance(transport, MpiTransport) and transport.streams is not None
    with monkeypatch.context() as before_a_message:
        before_a_message.setattr(again, "start", lambda: again.stand_at(SAVED))
        again.load_state_dict(saved[0])
    assert same(again.state_dict(), saved[0])
    again.start()
    transport.drain()
    copies_agree(comm, transport)
    comm.Barrier()
    resumed = Script(comm, transport, SAVED)
    again.observers.append(resumed.boundary)
    again.load_state_dict(saved[0])
    go(comm, again)
    for r in range(SAVED, END + 1):
        assert torch.equal(resumed.x[r], script.x[r]), f"round {r}"
    again.finish()
