"""Messages from device memory: can MPI read it, and is that faster than copies through the host?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ...transport.device import device_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from ...transport.mpi import MpiTransport

Mode = Literal["direct", "host"]
FIRST, LARGEST = 1 << 20, 1 << 26  # bytes
MESSAGE_S = 0.05
LEAST = 1 << 16
REPEATS = 6


def try_direct(comm: MPI.Comm, device: torch.device, limit_s: float) -> dict[str, Any]:
    """Device memory through MPI: in a child process first, which may crash, then here.

    It is tried whatever MPI says of itself. Collective: the way is open if it is on every rank.
    """
    from ...transport.mpi import cuda_child, cuda_probe
    from ...transport.mpi.collectives import agree

    memory = f"cuda:{device.index or 0}" if device.type == "cuda" else "host"
    start = time.perf_counter()
    why_not = cuda_child.why_not(memory, limit_s)
    survives = agree(comm, not why_not)
    works = survives and cuda_probe.arrives(comm, device)
    if survives and not works:
        why_not = "a payload did not arrive intact"
    return {
        "says": cuda_probe.says_cuda_aware(),
        "works": works,
        "unfinished": survives and not works,
        "why_not": why_not,
        "seconds": time.perf_counter() - start,
    }


def speed(
    made: Callable[[Mode], MpiTransport], modes: list[Mode], device: torch.device
) -> dict[str, Any]:
    """Seconds of an exchange by each mode, and those of the copies alone. Collective."""
    found: dict[str, Any] = {"bytes": 0, "seconds": {}}
    for mode in modes:
        transport = made(mode)
        if not found["bytes"]:
            found["bytes"] = _size(transport, device)
        x = torch.zeros(found["bytes"] // 4, device=device)
        found["seconds"][mode] = exchange_s(transport, x)
        transport.close()
    found["copy_s"] = _copies(found["bytes"], device)
    return found


def _size(transport: MpiTransport, device: torch.device) -> int:
    """Bytes whose exchange takes about MESSAGE_S; the same on every rank."""
    took = exchange_s(transport, torch.zeros(FIRST // 4, device=device), 3)
    return int(min(LARGEST, max(LEAST, FIRST * MESSAGE_S / took))) // 4 * 4


def exchange_s(transport: MpiTransport, x: torch.Tensor, repeats: int = REPEATS) -> float:
    """Until what was received lies in device memory; the quickest, on the slowest rank."""
    here, took = device_of(x.device), []
    for r in range(repeats):
        here.synchronize()
        start = transport.barrier()
        transport.exchange(x, r).wait()
        here.synchronize()
        took.append(time.perf_counter() - start)
        transport.drain()
    ranks = transport.everywhere(*took).result().max(axis=0)
    return float(ranks[1:].min())  # the first one opens connections


def _copies(nbytes: int, device: torch.device) -> float:
    """A snapshot to pinned host memory and back: the quicker half of nine."""
    here = device_of(device)
    x = torch.zeros(nbytes // 4, device=device)
    host = here.pinned(x.shape, x.dtype)
    took = []
    for _ in range(10):
        here.synchronize()
        start = time.perf_counter()
        here.copy(host, x)
        here.copy(x, host)
        here.synchronize()
        took.append(time.perf_counter() - start)
    return float(np.percentile(took[1:], 25))
