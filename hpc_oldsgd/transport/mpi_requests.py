"""Small MPI pieces: request sets that an engine can start and test, addresses, text gathers."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from ..errors import UserError

T = TypeVar("T")
GRACE_S = 0.5  # mpirun drops what it has not read yet when a job aborts
TAG_CLOCK = 29_999


class PersistentRequests:
    """Persistent receives and sends over fixed buffers, started and tested together."""

    def __init__(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        self.receives = list(receives)
        self.sends = list(sends)
        self._all = [*self.receives, *self.sends]
        size = MPI._sizeof(MPI.Request)
        # Handles of persistent requests never change, so a copy of them is as good.
        self._handles = (ctypes.c_char * max(1, size * len(self._all)))()
        for k, request in enumerate(self._all):
            ctypes.memmove(
                ctypes.addressof(self._handles) + k * size, MPI._addressof(request), size
            )
        self.native = (ctypes.addressof(self._handles), len(self.receives), len(self._all))

    def start(self) -> None:
        # Receives first: a message that arrives unexpected is copied twice.
        if self.receives:
            MPI.Prequest.Startall(self.receives)
        if self.sends:
            MPI.Prequest.Startall(self.sends)

    def test(self) -> bool:
        return bool(MPI.Request.Testall(self._all)) if self._all else True

    def free(self) -> None:
        for request in self._all:
            request.Free()


class StartedRequest:
    """One nonblocking collective that the caller has started."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.native = (MPI._addressof(request), 1, 1)  # MPI nulls the handle in place

    def start(self) -> None:
        raise AssertionError("started by the caller")

    def test(self) -> bool:
        return bool(self._request.Test())


def as_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's memory for MPI, uncopied: any dtype, also those MPI does not know."""
    assert tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), MPI.BYTE]


def pieces(tensor: torch.Tensor, limit_bytes: int) -> list[torch.Tensor]:
    """Slices of at most `limit_bytes`: an int count ends at 2^31, and some MPIs before."""
    step = max(1, limit_bytes // tensor.element_size())
    return [tensor[a : a + step] for a in range(0, max(1, tensor.numel()), step)]


def functions() -> dict[str, int]:
    """Addresses in the MPI library that mpi4py has loaded."""
    library = ctypes.CDLL(MPI.__file__)  # looks through the libraries it is linked with
    names = ("MPI_Startall", "MPI_Testall")
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}


def vendor() -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def sizes() -> tuple[int, int]:
    return MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)


def gather_text(comm: MPI.Comm, text: str) -> list[str]:
    """Every rank's text, on every rank; plain bytes, nothing is unpickled from a peer."""
    own = np.frombuffer(text.encode(), dtype=np.uint8)
    counts = np.zeros(comm.size, dtype=np.int64)
    comm.Allgather(np.array([own.size], dtype=np.int64), counts)
    everything = np.empty(int(counts.sum()), dtype=np.uint8)
    offsets = np.concatenate(([0], np.cumsum(counts)[:-1]))
    comm.Allgatherv(own, [everything, (counts, offsets), MPI.BYTE])
    ends = offsets + counts
    return [everything[a:b].tobytes().decode() for a, b in zip(offsets, ends, strict=True)]


def abort_on_error(comm: MPI.Comm) -> None:
    """An exception nobody catches on one rank ends the job, instead of hanging the others."""
    if comm.size == 1 or getattr(sys.excepthook, "aborts", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        shown = f"rank {comm.rank} failed, the job ends:\n"
        if isinstance(error, UserError):
            shown += f"hpc_oldsgd: {error}\n"
        else:
            shown += "".join(traceback.format_exception(kind, error, tb))
        end_job(MPI.COMM_WORLD, shown, int(getattr(error, "exit_code", 1)))

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_job(comm: MPI.Comm, message: str, code: int) -> None:
    """Say why, then end every rank. Does not return."""
    sys.stdout.flush()
    sys.stderr.write(message)  # in one piece, not mixed with other ranks' lines
    sys.stderr.flush()
    time.sleep(GRACE_S)
    comm.Abort(code)


def clock_offset(comm: MPI.Comm, tries: int = 16) -> float:
    """Rank 0's time.perf_counter minus ours, from the quickest of a few echoes. Collective.

    Exactly 0 between ranks of one machine: they share its monotonic clock.
    """
    hosts = gather_text(comm, MPI.Get_processor_name())
    clock, best = np.zeros(1), (np.inf, 0.0)
    for j in range(1, comm.size):
        if hosts[j] == hosts[0] or comm.rank not in (0, j):
            continue
        for _ in range(tries):
            if comm.rank == 0:
                comm.Recv(clock, j, TAG_CLOCK)
                clock[0] = time.perf_counter()
                comm.Send(clock, j, TAG_CLOCK)
            else:
                left = time.perf_counter()
                comm.Send(clock, 0, TAG_CLOCK)
                comm.Recv(clock, 0, TAG_CLOCK)
                back = time.perf_counter()
                best = min(best, (back - left, clock[0] - (left + back) / 2))
    return float(best[1])


def agree(comm: MPI.Comm, yes: bool) -> bool:
    """True if every rank says yes."""
    flag = np.array([yes], dtype=np.int32)
    comm.Allreduce(MPI.IN_PLACE, flag, MPI.MIN)
    return bool(flag[0])


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


def exchange_with_self(comm: MPI.Comm, sent: torch.Tensor, received: torch.Tensor) -> None:
    comm.Sendrecv(as_bytes(sent), comm.rank, 0, as_bytes(received), comm.rank, 0)


class Startup:
    """The steps before an agent exists; an error on one rank becomes everybody's error."""

    def __init__(self, comm: MPI.Comm) -> None:
        abort_on_error(comm)
        self.comm = comm
        # By host name: MPI's own "shared" split says 1 where shared memory is switched off.
        host = platform.node()
        self.ranks_here = gather_text(comm, host).count(host)

    def check(self, step: Callable[[], T]) -> T:
        """Run a step on all ranks. Collective: raises on all if it raised a UserError on any."""
        result, problem = None, ""
        try:
            result = step()
        except UserError as error:
            problem = str(error)
        problems = gather_text(self.comm, problem)
        bad = [j for j, text in enumerate(problems) if text]
        if bad:
            where = "" if len(bad) == len(problems) or bad[0] == 0 else f"rank {bad[0]}: "
            raise UserError(where + problems[bad[0]])
        return result  # type: ignore[return-value]

    def clock_offset(self) -> float:
        return clock_offset(self.comm)

    def same_text(self, text: str) -> str:
        """Rank 0's."""
        return gather_text(self.comm, text)[0]
