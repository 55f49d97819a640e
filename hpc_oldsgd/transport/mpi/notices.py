"""What a rank tells the others when it may wait for them for good: it has ended, or takes a mean.

All ranks make the same collective calls in the same order. If one rank does not, the others would
wait for the time limit and could only say who is late. With a notice they say what happened.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import UserError
from .collectives import POLL_S

ARRIVES_S = 5.0  # a message that left before its rank ended is here by then
FINISHED, STOPPED, ENDED, AVERAGES = range(4)
DOES = {
    FINISHED: "called finish()",
    STOPPED: "called stop()",
    ENDED: "came to the end of its script",
    AVERAGES: "waits for all ranks in mean()",
}


class Notices:
    """Of one rank, on a communicator of their own: a few bytes to every other rank.

    `calls` counts the collective calls that this rank has begun, `t` its steps. Both go along.
    """

    def __init__(self, comm: MPI.Comm, open_calls: Callable[[], int] = lambda: 0) -> None:
        """`open_calls` counts those that this rank has begun and not waited for."""
        self.calls, self.t = 0, 0
        self._open_calls = open_calls
        self.means: deque[int] = deque(maxlen=1000)
        """Which of the calls were means."""
        self._comm = comm.Dup()
        self._sent: list[Any] = []
        self._heard: dict[int, tuple[int, int, int]] = {}
        self._never_left: dict[int, tuple[int, float]] = {}
        """Of ranks that have ended: the calls whose messages may not have left, and since when."""
        self._told = self._in_mean = False
        _open.add(self)

    @contextlib.contextmanager
    def mean(self) -> Iterator[None]:
        """Around a collective call that has to be the same call on all ranks."""
        self.calls += 1
        self.means.append(self.calls)
        self._in_mean, self._told = True, False
        yield
        self._in_mean = False

    def tell_end(self, stopped: bool) -> None:
        self.tell(STOPPED if stopped else FINISHED)

    def tell(self, what: int) -> None:
        still_open = self._open_calls() if what == ENDED else 0
        message = np.array([what, self.calls, self.t, still_open], dtype=np.int64)
        others = [j for j in range(self._comm.size) if j != self._comm.rank]
        self._sent += [(self._comm.Isend(message, j), message) for j in others]

    def look(self) -> None:
        """While this rank waits. Raises if another one will never join the call."""
        if self._in_mean and not self._told:
            self.tell(AVERAGES)
            self._told = True
        self._receive()
        for j, (what, calls, t) in self._heard.items():
            missed = self.calls >= calls and calls not in self.means
            if missed if what == AVERAGES else self.calls > self._joined(j, calls):
                own = "waits in mean()" if self._in_mean else "trains on"
                raise UserError(
                    f"rank {j} {DOES[what]} after {t} steps, while rank {self._comm.rank} {own} "
                    f"after {self.t} steps: all ranks must make the same calls in the same order; "
                    "if their data differ in length, loop over agent.batches(loader)"
                )

    def _joined(self, j: int, calls: int) -> int:
        """The last call of rank j that this rank may wait for."""
        still_open, since = self._never_left.get(j, (0, 0.0))
        return calls - still_open if time.perf_counter() - since > ARRIVES_S else calls

    def close(self, timeout_s: float | None) -> None:
        """Everybody's last notice has come: nothing is left on the way. Collective."""
        start = time.perf_counter()
        while sum(heard[0] != AVERAGES for heard in self._heard.values()) < self._comm.size - 1:
            self._receive()
            time.sleep(POLL_S)
            if timeout_s is not None and time.perf_counter() - start > timeout_s:
                return  # somebody ended without finish(): the communicator stays
        MPI.Request.Waitall([request for request, _ in self._sent])
        _open.discard(self)
        self._comm.Free()

    def _receive(self) -> None:
        status, message = MPI.Status(), np.zeros(4, dtype=np.int64)
        while self._comm.Iprobe(status=status):
            self._comm.Recv(message, status.Get_source())
            what, calls, t, still_open = map(int, message)
            self._heard[status.Get_source()] = what, calls, t
            self._never_left[status.Get_source()] = still_open, time.perf_counter()


_open: weakref.WeakSet[Notices] = weakref.WeakSet()


@atexit.register
def _tell_the_end() -> None:
    for notices in _open:
        notices.tell(ENDED)
