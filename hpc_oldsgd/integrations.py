"""What a script with a training framework needs: Hugging Face Trainer, Accelerate, Lightning.

docs/integrations has a page for each framework, and examples a script.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from .data import torchvision_shim
from .launch.device import local_rank
from .launch.launcher import check_world

torchvision_shim.prepare()  # transformers and torchmetrics import torchvision

HIDDEN = (
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
"""Accelerate and Lightning take these as an order to start torch.distributed."""


def start() -> tuple[int, int]:
    """Start MPI; returns this rank and the number of ranks. Call it before the framework is made.

    From here on the framework sees one process with one GPU. The ranks meet in the Agent alone.
    """
    from .transport.mpi import world  # starts MPI, which reads the launcher's variables

    comm = world()
    check_world(comm.size)  # while they are there
    for name in HIDDEN:
        os.environ.pop(name, None)
    _show_own_gpu()
    return comm.rank, comm.size


def newest(folder: str | os.PathLike[str], pattern: str) -> Path | None:
    """The path in this rank's folder with the largest numbers in its name that all ranks have.

    Each rank gives its own folder: a job may have died after some ranks had saved. None if there is
    no such path. Collective.
    """
    from .transport.mpi import world

    found = {str(path.relative_to(folder)) for path in Path(folder).glob(pattern)}
    common: set[str] = set.intersection(*world().allgather(found))
    last = max(common, key=lambda name: [int(k) for k in re.findall(r"\d+", name)], default=None)
    return None if last is None else Path(folder) / last


def _show_own_gpu() -> None:
    """A framework that sees several GPUs would use all of them in every rank."""
    count = torch.cuda.device_count()
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank() % count]
