"""Does this MPI move device memory? Only a payload that arrives intact proves it.

The trial goes the way of a run: persistent requests that the progress engine starts and tests. It
has a time limit. A child process has tried before, since a crash would end the job.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch
from mpi4py import MPI

from ... import ops
from ..device import Device, device_of
from ..progress import Engine, Stage
from . import cuda_child
from .collectives import agree, gather_text
from .requests import PersistentRequests, as_bytes, make_engine

LIMIT_S = 30.0
_never_came: list[Any] = []
"""Memory and requests of a trial that MPI may still use."""


def cuda_aware(comm: MPI.Comm, device: torch.device, engine: Engine | None = None) -> bool:
    """Collective: all or none. `engine` is that of the run.

    An MPI that is not CUDA-aware may crash on a device pointer rather than fail, so nothing is
    tried unless the library says of itself that it can.
    """
    here = device_of(device)
    if not agree(comm, not here.is_host and says_cuda_aware()):
        return False
    why = _tried_apart(comm, here)
    if not why and not arrives(comm, device, engine):
        why = f"a payload did not arrive intact within {LIMIT_S:g} s"
    if why and comm.rank == 0:
        warnings.warn(
            f"MPI says that it is CUDA-aware, but {why}: messages go through host memory; "
            "--staging direct tries it all the same",
            stacklevel=2,
        )
    return not why


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


def _tried_apart(comm: MPI.Comm, device: Device) -> str:
    """By a child process of one rank on each host; empty if none failed. Collective."""
    on_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = on_host.rank == 0
    on_host.Free()
    memory = f"cuda:{device.torch.index or 0}" if device.torch.type == "cuda" else "host"
    said = gather_text(comm, cuda_child.why_not(memory) if first else "")
    return next(filter(None, said), "")


def arrives(comm: MPI.Comm, device: torch.device, engine: Engine | None = None) -> bool:
    """A pattern of every rank's own goes to the next rank, device to device. Collective."""
    left = (comm.rank - 1) % comm.size
    sent, expected = pattern(comm.rank, device), pattern(left, device)
    received = torch.zeros_like(expected)
    here = device_of(device)
    here.synchronize()
    own = None
    if engine is None:
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        engine = own = make_engine(ops.native_available(), threads)
        engine.work_with(here)
    apart = comm.Dup()  # what never arrives meets no other message
    apart.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        came = pass_around(apart, sent, received, engine)
        works = came and bool(torch.equal(received, expected))
    except Exception:  # any refusal means no
        works = False
    if own is not None:
        own.stop()
    works = agree(comm, works)
    if works:
        apart.Free()
    return works


def pass_around(comm: MPI.Comm, sent: torch.Tensor, received: torch.Tensor, engine: Engine) -> bool:
    """To the right neighbour's rank, from the left one's; whether that ended within the limit."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    requests = PersistentRequests(
        [comm.Recv_init(as_bytes(received), left)], [comm.Send_init(as_bytes(sent), right)]
    )
    job = engine.submit([Stage(requests)])
    if not engine.wait(job, LIMIT_S) or job.error:
        _never_came.append((comm, requests, sent, received, job))
        return False
    requests.free()
    return True


def pattern(rank: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(1 << 16, dtype=torch.int64, device=device)
    return ((numbers + rank) * 2654435761 % (1 << 30)).to(torch.int32)
