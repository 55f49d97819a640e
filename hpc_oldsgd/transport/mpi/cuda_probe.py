"""Does this MPI move device memory? Only a payload that arrives intact proves it."""

from __future__ import annotations

import ctypes

import torch
from mpi4py import MPI

from .collectives import agree
from .requests import as_bytes


def cuda_aware(comm: MPI.Comm, device: torch.device) -> bool:
    """Collective: all or none.

    An MPI that is not CUDA-aware may crash on a device pointer rather than fail, so the probe
    runs only where the library says of itself that it can.
    """
    return agree(comm, device.type == "cuda" and says_cuda_aware()) and arrives(comm, device)


def says_cuda_aware() -> bool:
    """What the library says of itself; Open MPI by a function, MPICH by its settings."""
    library = ctypes.CDLL(MPI.__file__)
    for name in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support"):
        try:
            query = getattr(library, name)
        except AttributeError:
            continue
        if name == "MPIX_Query_cuda_support":
            return bool(query())
        flag = ctypes.c_int(0)
        return query(0, ctypes.byref(flag)) == 0 and bool(flag.value)
    return False


def arrives(comm: MPI.Comm, device: torch.device) -> bool:
    """A pattern of every rank's own goes to the next rank, device to device. Collective."""
    left = (comm.rank - 1) % comm.size
    sent, expected = pattern(comm.rank, device), pattern(left, device)
    received = torch.zeros_like(expected)
    torch.get_device_module(device).synchronize(device)
    try:
        pass_around(comm, sent, received)
        works = bool(torch.equal(received, expected))
    except Exception:  # any refusal means no
        works = False
    return agree(comm, works)


def pass_around(comm: MPI.Comm, sent: torch.Tensor, received: torch.Tensor) -> None:
    """To the right neighbour's rank, from the left one's."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.Sendrecv(as_bytes(sent), right, 0, as_bytes(received), left, 0)


def pattern(rank: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1 << 16, dtype=torch.int64, device=device)
    return ((numbers + rank) * 2654435761 % (1 << 30)).to(torch.int32)
