"""Does this MPI move device memory? Only a payload that arrives intact proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpi4py import MPI


def cuda_aware(comm: MPI.Comm, device: torch.device) -> bool:
    """Collective: all or none.

    An MPI that is not CUDA-aware may crash on a device pointer rather than fail, so the probe
    runs only where the library says of itself that it can.
    """
    from .requests import agree, says_cuda_aware

    return agree(comm, device.type == "cuda" and says_cuda_aware()) and arrives(comm, device)


def arrives(comm: MPI.Comm, device: torch.device) -> bool:
    """A pattern of every rank's own goes to the next rank, device to device. Collective."""
    from .requests import agree, pass_around

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


def pattern(rank: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1 << 16, dtype=torch.int64, device=device)
    return ((numbers + rank) * 2654435761 % (1 << 30)).to(torch.int32)
