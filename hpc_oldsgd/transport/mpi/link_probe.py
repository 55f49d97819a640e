"""What the doctor asks of MPI: its library, and how long bytes take between two ranks or all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
TAG_PING, TAG_SIZE, TAG_ALL = 29_996, 29_997, 29_998
IDLE_S = 5e-4
LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def library() -> dict[str, str]:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().split() if maps.exists() else []
    files = [word for word in loaded if Path(word).name.startswith(("libmpi.", "libmpich."))]
    return {
        "version": " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": LEVELS[MPI.Query_thread()],
        "file": files[0] if files else "",
    }


def pattern(rank: int, nbytes: int) -> Bytes:
    """Bytes that no other rank sends, and that a shifted or repeated piece does not equal."""
    k = np.arange(-(-nbytes // 8), dtype=np.uint64)
    k *= np.uint64(0x9E3779B97F4A7C15)
    k += np.uint64(rank + 1)
    k ^= k >> np.uint64(29)
    return k.view(np.uint8)[:nbytes]


def barrier(comm: MPI.Comm) -> None:
    """A barrier whose waiting ranks leave the cores to those that measure."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(IDLE_S)


def ping(comm: MPI.Comm, peer: int, nbytes: int, repeats: int) -> tuple[list[float], bool]:
    """Half the time of each round trip, and whether the peer's bytes came intact. Both call it."""
    sent, received = pattern(comm.rank, nbytes), np.zeros(nbytes, dtype=np.uint8)
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        arrives = comm.Irecv(received, peer, TAG_PING)
        if comm.rank > peer:
            _finish([arrives])
        leaves = comm.Isend(sent, peer, TAG_PING)
        _finish([arrives, leaves])
        took.append((time.perf_counter() - start) / 2)
    return took, bool(np.array_equal(received, pattern(peer, nbytes)))


def same_size(comm: MPI.Comm, peer: int, nbytes: int) -> int:
    """What the lower rank of a pair proposes, on both."""
    size = np.array([nbytes], dtype=np.int64)
    if comm.rank < peer:
        comm.Send(size, peer, TAG_SIZE)
    else:
        comm.Recv(size, peer, TAG_SIZE)
    return int(size[0])


def all_at_once(comm: MPI.Comm, peers: Sequence[int], nbytes: int) -> list[float]:
    """Everybody sends to and receives from its peers: seconds until each one's bytes were here.

    Collective, also for ranks without peers.
    """
    sent = pattern(comm.rank, nbytes)
    into = [np.empty(nbytes, dtype=np.uint8) for _ in peers]
    barrier(comm)
    start = time.perf_counter()
    arrives = [comm.Irecv(b, j, TAG_ALL) for b, j in zip(into, peers, strict=True)]
    leaves = [comm.Isend(sent, j, TAG_ALL) for j in peers]
    done = [0.0] * len(peers)
    while not all(done):
        for k, request in enumerate(arrives):
            if not done[k] and request.Test():
                done[k] = time.perf_counter() - start
        os.sched_yield()
    _finish(leaves)
    barrier(comm)
    return done


def _finish(requests: list[Any]) -> None:
    while not MPI.Request.Testall(requests):
        os.sched_yield()  # ranks may share a core
