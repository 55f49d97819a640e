"""Small MPI pieces: request sets that an engine can start and test, addresses, text gathers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from threading import Timer
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from ...errors import NeighbourTimeout, UserError

T = TypeVar("T")
AFTER_RANK_0_S = 1.0  # what all ranks meet, one says
GRACE_S = 0.5  # mpirun drops what it has not read yet when a job aborts
START_LEAST_S = 30.0  # importing and loading take longer than a round
GATHER_GRACE_S = 20.0
POLL_S = 2e-4
TAG_CLOCK = 29_999
TAG_TEXT = 29_998


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


def gather_text(comm: MPI.Comm, text: str, timeout_s: float | None = None) -> list[str]:
    """Every rank's text, on every rank; plain bytes, nothing is unpickled from a peer.

    By way of rank 0, which so knows who is missing; the others leave it the time to say so.
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
        _not_for_ever(start, timeout_s, f"rank {', '.join(map(str, missing[:8]))}")
    return [bytes(texts[j]) for j in range(1, comm.size)]


def complete(request: MPI.Request, timeout_s: float | None, whom: str) -> None:
    """Wait for it, at most so long; for the steps before and after the training."""
    start = time.perf_counter()
    while not request.Test():
        _not_for_ever(start, timeout_s, whom)


def _not_for_ever(start: float, timeout_s: float | None, whom: str) -> None:
    time.sleep(POLL_S)
    waited = time.perf_counter() - start
    if timeout_s is not None and waited > max(timeout_s, START_LEAST_S):
        rank = MPI.COMM_WORLD.rank
        raise NeighbourTimeout(f"rank {rank} has waited {waited:.0f} s for {whom} to start or end")


def abort_on_error(comm: MPI.Comm) -> None:
    """An exception nobody catches on one rank ends the job, instead of hanging the others."""
    if comm.size == 1 or getattr(sys.excepthook, "aborts", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if comm.rank and not isinstance(error, (NeighbourTimeout, KeyboardInterrupt)):
            time.sleep(AFTER_RANK_0_S)
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
    _last_words(message)
    comm.Abort(code)


@contextlib.contextmanager
def limit(timeout_s: float | None, to_do: str) -> Iterator[None]:
    """For calls that have no limit of their own: a rank that never comes to them ends the job."""
    if timeout_s is None:
        yield
        return
    message = f"rank {MPI.COMM_WORLD.rank} has waited {timeout_s:.0f} s {to_do}\n"
    timer = Timer(timeout_s, end_job, (MPI.COMM_WORLD, message, 4))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_rank(message: str) -> None:
    """Say why, then die as a killed process does: to exit in order, MPI would wait for others."""
    _last_words(message)
    os.kill(os.getpid(), signal.SIGKILL)


def _last_words(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(message)  # in one piece, not mixed with other ranks' lines
    sys.stderr.flush()
    time.sleep(GRACE_S)


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
    """Without a sleep, which would be measured."""
    request, start = comm.Irecv(clock, source, TAG_CLOCK), time.perf_counter()
    while not request.Test():
        if time.perf_counter() - start > START_LEAST_S:
            _not_for_ever(start, timeout_s, f"rank {source}")


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


def pass_around(comm: MPI.Comm, sent: torch.Tensor, received: torch.Tensor) -> None:
    """To the right neighbour's rank, from the left one's."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.Sendrecv(as_bytes(sent), right, 0, as_bytes(received), left, 0)


class Startup:
    """The steps before an agent exists; an error on one rank becomes everybody's error."""

    def __init__(self, comm: MPI.Comm, timeout_s: float | None = None) -> None:
        abort_on_error(comm)
        self.comm, self.timeout_s = comm, timeout_s
        # By host name: MPI's own "shared" split says 1 where shared memory is switched off.
        own = {f"{platform.node()}:{core}" for core in os.sched_getaffinity(0)}
        everybody = self.gather(" ".join(sorted(own)))
        self.sharing = sum(not own.isdisjoint(cores.split()) for cores in everybody)
        """Ranks that may run on this one's cores, itself among them; 1 where each is bound."""

    def check(self, step: Callable[[], T]) -> T:
        """Run a step on all ranks. Collective: raises on all if it raised a UserError on any."""
        result, problem = None, ""
        try:
            result = step()
        except UserError as error:
            problem = str(error)
        except OSError as error:  # a file that cannot be read, a disk that is full
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        problems = self.gather(problem)
        bad = [j for j, text in enumerate(problems) if text]
        if bad:
            where = "" if len(bad) == len(problems) or bad[0] == 0 else f"rank {bad[0]}: "
            raise UserError(where + problems[bad[0]])
        return result  # type: ignore[return-value]

    def clock_offset(self) -> float:
        return clock_offset(self.comm, timeout_s=self.timeout_s)

    def gather(self, text: str) -> list[str]:
        return gather_text(self.comm, text, self.timeout_s)
