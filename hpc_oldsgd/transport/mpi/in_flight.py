"""What is under way over MPI: its job, its copies from and to a device, and its times."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ..base import FlightRecord
from ..progress import Job, Stage

if TYPE_CHECKING:
    from . import MpiTransport, WaitsFor

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Memory(ABC):
    """Buffers and requests for one flight at a time, made once and used again."""

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int) -> None:
        self.transport, self.number = transport, number
        self.busy = False
        self.staging = transport.staging_for(x.device)
        self._model = (x.shape, x.dtype, x.device)

    def fits(self, x: torch.Tensor) -> bool:
        return not self.busy and self._model == (x.shape, x.dtype, x.device)

    @abstractmethod
    def free(self) -> None: ...


class StagedJob:
    """A job of the progress engine, and where the memory is staged the copies around it.

    `out` are (host, device) pairs to copy before it starts, `back` (device, host) pairs after it.
    """

    def __init__(
        self, memory: Memory, stages: list[Stage], out: Pairs = (), back: Pairs = ()
    ) -> None:
        self._transport, self._engine = memory.transport, memory.transport.engine
        self._stages = stages  # the native engine reads MPI's handles in them
        staging = self._staging = memory.staging
        self._back = back
        self._job: Job | None = None
        self._future: Future[tuple[float, Any]] | None = None
        if staging is None:
            self._job = self._engine.submit(stages)
        elif self._engine.threaded:
            self._future = staging.fly(out, back, self._send)
        else:
            # Without MPI_THREAD_MULTIPLE only this thread may call MPI: copy out now, back later.
            staging.fly(out, [], float).result()
            self._job = self._engine.submit(stages)

    def done(self) -> bool:
        if self._future is not None:
            return self._future.done()
        return self._job is not None and self._job.done

    def wait(self, waits_for: WaitsFor) -> float:
        """When it was through."""
        if self._future is not None:
            future = self._future
            self._transport.await_done(
                lambda seconds: bool(wait_for([future], seconds).done), waits_for
            )
            completed, arrived = future.result()
        else:
            assert self._job is not None
            self._transport.await_job(self._job, waits_for)
            completed = self._job.done_s
            if self._staging is None:
                return completed
            arrived = self._staging.fly(self._back, [], float).result()[1]
        assert self._staging is not None
        self._staging.before_reading(arrived)
        return completed

    def _send(self) -> float:
        """In a worker of the staging, which is not the agent: so without a time limit."""
        job = self._engine.submit(self._stages)
        while not self._engine.wait(job, 0.5):
            pass
        if job.error:
            raise MPI.Exception(job.error)
        return job.done_s


class InFlight(ABC):
    """What an exchange and a reduction share: they are waited for, timed and ended once."""

    kind = "exchange"
    track = "flight"
    left_out = 0
    share = 1.0
    part = ""

    def __init__(self, memory: Memory, round: int) -> None:
        memory.busy = True
        self._memory, self.transport = memory, memory.transport
        self.round = round
        self.lane = memory.number
        self.waited = False
        self.posted = time.perf_counter()

    def wait(self) -> None:
        if self.waited:
            return
        start = time.perf_counter()
        completed = self._complete()
        self.waited = True
        self._record(start, completed)

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def waits_for(self, over: bool) -> str:
        """Names who is late."""

    @abstractmethod
    def _complete(self) -> float:
        """Wait until all is here; when it was through."""

    def end(self) -> None:
        self.transport._open.remove(self)
        self._memory.busy = False

    def drop(self) -> None:
        """End it, complete but not used."""
        self.end()

    def _record(self, start: float, completed: float) -> None:
        end, trace, r = time.perf_counter(), self.transport.trace, self.round
        named = {"fragment": self.part} if self.part else {}
        if trace is not None:
            trace.span(
                self.track, self.kind, self.posted, completed, round=r, lane=self.lane,
                share=self.share, **named,
            )  # fmt: skip
        if self.kind == "evaluate":
            return
        self.transport.records.append(
            FlightRecord(
                self.kind, r, self.posted, completed, end - start, self.left_out, self.share
            )
        )
        if trace is not None:
            trace.span("wait", self.kind, start, end, round=r, **named)
