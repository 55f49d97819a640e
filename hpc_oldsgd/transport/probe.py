"""Does this MPI move device memory? Only a payload that arrives intact proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpi4py import MPI


def cuda_aware(comm: MPI.Comm, device: torch.device) -> bool:
    """Each rank sends itself a pattern from device to device memory. Collective: all or none.

    An MPI that is not CUDA-aware may crash on a device pointer rather than fail, so the probe
    runs only where the library says of itself that it can.
    """
    from .mpi_requests import agree, exchange_with_self, says_cuda_aware

    works = device.type == "cuda" and says_cuda_aware()
    if agree(comm, works):
        sent = torch.arange(1 << 16, dtype=torch.int32, device=device) * 2654435761 % (1 << 30)
        received = torch.zeros_like(sent)
        torch.get_device_module(device).synchronize()
        try:
            exchange_with_self(comm, sent, received)
            works = bool(torch.equal(sent, received))
        except Exception:  # any refusal means no
            works = False
        return agree(comm, works)
    return False
