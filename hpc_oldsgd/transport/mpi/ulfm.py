"""Going on after the death of a rank, where MPI can: user-level failure mitigation (ULFM).

A rank that notices the death revokes the communicator, which ends every wait on it everywhere;
then the survivors shrink it to a smaller one. Requests are only tested, never waited for inside
MPI: over TCP a blocking wait does not survive the death of a peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from ...errors import UserError
from .collectives import complete, gather_text
from .job import limit, vendor

if TYPE_CHECKING:
    from ...topology import Topology
    from . import MpiTransport
    from .all_reduce import MpiPending
    from .in_flight import InFlight

SETTLE_S = 10.0  # until MPI has let go of the buffers of a revoked communicator
survivors: list[tuple[MPI.Comm, float | None]] = []
"""After each death: the communicator of those that live, and their time limit. The last counts."""


def require_ulfm() -> None:
    """Raises UserError where MPI ends all ranks when one dies."""
    try:
        on = ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_ftmpi_enabled").value
    except ValueError:
        raise UserError(
            f"--on-failure shrink needs an MPI with ULFM, and this is {vendor()}: use Open MPI 5"
        ) from None
    if not on:
        raise UserError(
            "--on-failure shrink: this Open MPI runs without fault tolerance: add --with-ft ulfm "
            "to mpirun"
        )


def is_death(transport: MpiTransport, error: BaseException) -> bool:
    """Whether the error means that another rank died, or that some rank has noticed a death."""
    if not isinstance(error, MPI.Exception):
        return False
    if error.Get_error_class() in (
        MPI.ERR_PROC_FAILED,
        MPI.ERR_PROC_FAILED_PENDING,
        MPI.ERR_REVOKED,
    ):
        return True
    with contextlib.suppress(MPI.Exception, AttributeError):
        return bool(transport.comm.Is_revoked() or transport.comm.Get_failed().size)
    return False


def shrink(transport: MpiTransport) -> list[int]:
    """Continue without the dead ranks; returns the old ranks of those that live.

    Collective among them. What was in flight is dropped; the topology fits again after `rebuild`.
    """
    old = transport.comm
    old.Revoke()
    timeout_s = None if transport.timeout_s is None else transport.timeout_s + SETTLE_S
    with limit(timeout_s, "to repair the graph"):  # staged copies may never end
        _settle(transport)
        new = old.Shrink()  # Ishrink frees what is not its own (Open MPI 5.0.11)
    transport.comm, transport.rank, transport.shrunk = new, new.rank, True
    survivors.append((new, transport.timeout_s))
    return list(MPI.Group.Translate_ranks(new.group, list(range(new.size)), old.group))


def meet(comm: MPI.Comm, timeout_s: float | None, told: str) -> str:
    """Wait for all before the end while nobody has died: MPI_Finalize would wait for ever.

    Returns what rank 0 has told, or after a death this rank's own text.
    """
    if survivors:
        return told  # they wait for each other in `leave`
    try:
        return gather_text(comm, told, timeout_s)[0]
    except MPI.Exception:  # one has died since
        with contextlib.suppress(MPI.Exception):
            comm.Revoke()
        survivors.append((comm, timeout_s))
    return told


def leave(code: int) -> None:
    """End this process together with the other survivors of a death. Does not return.

    All take the largest code: only the one that writes the folder knows what was not saved.

    It skips MPI_Finalize, which in Open MPI 5.0.11 may wait for a dead rank for ever.
    """
    comm, timeout_s = survivors[-1]
    with contextlib.suppress(MPI.Exception):  # another one has died
        codes = np.array([code])
        complete(comm.Iallreduce(MPI.IN_PLACE, codes, MPI.MAX), timeout_s, "the other survivors")
        code = int(codes[0])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rebuild(transport: MpiTransport, topology: Topology) -> None:
    """Buffers and requests for the new graph are made when they are first used. Collective."""
    transport.topology = topology
    transport.hosts = gather_text(transport.comm, transport.status.host, transport.timeout_s)
    transport.status.reductions = 0
    transport.records.clear()
    transport.distance = None
    transport.begin_streams()
    transport.engine = transport.make_engine()


def _settle(transport: MpiTransport) -> None:
    """Wait until no request of the revoked communicator is under way, then drop them all."""
    until = time.perf_counter() + SETTLE_S
    under_way: list[InFlight | MpiPending] = [*transport._open, *transport._numbers]
    for each in under_way:
        while not each.done() and time.perf_counter() < until:
            transport.engine.poll()
            time.sleep(1e-4)
    if not all(each.done() for each in under_way):  # MPI may still write into their buffers
        transport.kept_alive.append((transport._channels, transport._rings, transport._numbers))
        transport.kept_alive.append(transport._open)
    if transport.staging is not None:
        transport.staging.stop()
        transport.staging = None
    transport.engine.stop()
    transport._channels, transport._rings = [], []
    transport._open, transport._numbers = [], []
