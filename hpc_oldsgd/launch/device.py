"""The GPU and the cores of one rank among those of its host."""

from __future__ import annotations

import os

import torch

from ..errors import UserError

LOCAL_RANK = (
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)


def local_rank() -> int:
    """The number of this rank on its host."""
    # Slurm's number comes last: under mpirun every rank has the batch script's, which is 0.
    return int(next((os.environ[k] for k in LOCAL_RANK if k in os.environ), "0"))


def choose_device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    # If each task sees one GPU, it is device 0. If a rank sees all, it takes its own.
    device = torch.device("cuda", local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def set_threads(threads: int, sharing: int) -> None:
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // sharing))


def unseen_gpu(device: torch.device) -> str:
    """A warning if the job has a GPU and torch does not see it; else empty."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if device.type == "cuda" or given in ("", "-1", "NoDevFiles"):
        return ""
    return (
        f"warning: CUDA_VISIBLE_DEVICES is {given}, but torch sees no GPU and trains on the CPU: "
        "install torch's CUDA build (make TORCH=... where there is no driver), or say --device cpu"
    )
