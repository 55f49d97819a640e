"""Small blocking collectives for the start and the end of a run, each with a time limit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from ...errors import NeighbourTimeout
from .requests import as_bytes, pieces

START_LEAST_S = 30.0  # importing and loading take longer than a round
GATHER_GRACE_S = 20.0  # the others wait longer than rank 0, so that it can name who is missing
POLL_S = 2e-4
TAG_CLOCK = 29_999
TAG_TEXT = 29_998


def gather_text(comm: MPI.Comm, text: str, timeout_s: float | None = None) -> list[str]:
    """Every rank's text, on every rank; plain bytes, nothing is unpickled from a peer.

    It goes through rank 0, which thereby knows who is missing and can name them.
    """
    counts = np.zeros(comm.size, dtype=np.int64)
    texts = [text.encode()]
    later_s = None if timeout_s is None else max(timeout_s, START_LEAST_S) + GATHER_GRACE_S
    if comm.rank == 0:
        texts += _receive_texts(comm, timeout_s)
        counts[:] = [len(t) for t in texts]
    else:
        complete(comm.Isend([texts[0], MPI.BYTE], 0, TAG_TEXT), later_s, "rank 0")
    complete(comm.Ibcast(counts), later_s, "rank 0")
    everything = bytearray(b"".join(texts) if comm.rank == 0 else int(counts.sum()))
    complete(comm.Ibcast([everything, MPI.BYTE]), later_s, "rank 0")
    ends = np.cumsum(counts)
    return [everything[b - k : b].decode() for k, b in zip(counts, ends, strict=True)]


def _receive_texts(comm: MPI.Comm, timeout_s: float | None) -> list[bytes]:
    texts: dict[int, bytearray] = {}
    start = time.perf_counter()
    while missing := [j for j in range(1, comm.size) if j not in texts]:
        for j in missing:
            status = MPI.Status()
            if comm.Iprobe(j, TAG_TEXT, status):
                texts[j] = bytearray(status.Get_count(MPI.BYTE))
                comm.Recv([texts[j], MPI.BYTE], j, TAG_TEXT)
        _check_limit(start, timeout_s, f"rank {', '.join(map(str, missing[:8]))}")
    return [bytes(texts[j]) for j in range(1, comm.size)]


def complete(request: MPI.Request, timeout_s: float | None, whom: str) -> None:
    """Wait for a request, with a time limit; for the steps before and after the training."""
    start = time.perf_counter()
    while not request.Test():
        _check_limit(start, timeout_s, whom)


def _check_limit(start: float, timeout_s: float | None, whom: str) -> None:
    time.sleep(POLL_S)
    waited = time.perf_counter() - start
    if timeout_s is not None and waited > max(timeout_s, START_LEAST_S):
        rank = MPI.COMM_WORLD.rank
        raise NeighbourTimeout(f"rank {rank} has waited {waited:.0f} s for {whom} to start or end")


def broadcast(
    comm: MPI.Comm, tensor: torch.Tensor, root: int, limit_bytes: int, timeout_s: float | None
) -> None:
    """In place, in pieces of at most `limit_bytes`."""
    host = tensor.detach().to("cpu").contiguous()
    for piece in pieces(host.view(-1), limit_bytes):
        complete(comm.Ibcast(as_bytes(piece), root), timeout_s, f"rank {root}")
    if host.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(host)


def clock_offset(comm: MPI.Comm, tries: int = 16, timeout_s: float | None = None) -> float:
    """Rank 0's time.perf_counter minus ours, from the quickest of a few echoes. Collective.

    Exactly 0 between ranks of one machine: they share its monotonic clock.
    """
    hosts = gather_text(comm, MPI.Get_processor_name(), timeout_s)
    clock, best = np.zeros(1), (np.inf, 0.0)
    for j in range(1, comm.size):
        if hosts[j] == hosts[0] or comm.rank not in (0, j):
            continue
        for _ in range(tries):
            if comm.rank == 0:
                _receive_clock(comm, clock, j, timeout_s)
                clock[0] = time.perf_counter()
                comm.Send(clock, j, TAG_CLOCK)
            else:
                left = time.perf_counter()
                comm.Send(clock, 0, TAG_CLOCK)
                _receive_clock(comm, clock, 0, timeout_s)
                back = time.perf_counter()
                best = min(best, (back - left, clock[0] - (left + back) / 2))
    return float(best[1])


def _receive_clock(comm: MPI.Comm, clock: Any, source: int, timeout_s: float | None) -> None:
    """Without a sleep: it would be part of the measured time."""
    request, start = comm.Irecv(clock, source, TAG_CLOCK), time.perf_counter()
    while not request.Test():
        if time.perf_counter() - start > START_LEAST_S:
            _check_limit(start, timeout_s, f"rank {source}")


def agree(comm: MPI.Comm, yes: bool) -> bool:
    """True if every rank says yes."""
    flag = np.array([yes], dtype=np.int32)
    comm.Allreduce(MPI.IN_PLACE, flag, MPI.MIN)
    return bool(flag[0])
