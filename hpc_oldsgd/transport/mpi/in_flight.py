"""What is under way over MPI: its job, its copies from and to a device, and its times."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from ..base import FlightRecord
from ..progress import Job, Stage
from ..staging import Arrival, Departure, Pairs, Staging

if TYPE_CHECKING:
    from . import MpiTransport, WaitsFor


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
        self._out, self._back = out, back  # alive until the device has copied them
        self._job: Job | None = None
        self._future: Future[Arrival] | None = None
        self._departure: Departure | None = None
        self._arrival: Arrival | None = None
        if staging is None:
            self._job = self._engine.submit(stages)
        elif self._engine.threaded:
            self._future = staging.fly(out, back, self._send)
        else:
            # Without MPI_THREAD_MULTIPLE only this thread may call MPI, and it must not wait here.
            self._departure = staging.depart(out)
            self.move()

    def move(self) -> None:
        """Without threads: go as far as possible without waiting."""
        if self._departure is not None and self._departure.copied.query():
            self._leave(self._departure)
        if self._staging is not None and self._arrival is None and _through(self._job):
            assert self._job is not None
            self._arrival = self._staging.come_back(self._back, self._job.done_s)
            self._arrival.posted_s = self._posted_s

    def _leave(self, departure: Departure) -> None:
        self._departure, self._posted_s = None, departure.posted()
        self._job = self._engine.submit(self._stages)

    def done(self) -> bool:
        if self._future is not None:
            return self._future.done()
        return self._job is not None and self._job.done

    def wait(self, waits_for: WaitsFor) -> float | Arrival:
        """When it was through; what came back from there, where it was staged."""
        if self._future is not None:
            future = self._future
            self._transport.await_done(
                lambda seconds: bool(wait_for([future], seconds).done), waits_for
            )
            self._arrival = future.result()
        else:
            if self._departure is not None:  # nothing is left to compute meanwhile
                self._departure.copied.synchronize()
                self._leave(self._departure)
            assert self._job is not None
            self._transport.await_job(self._job, waits_for)
            if self._staging is None:
                return self._job.done_s
            self.move()
        assert self._staging is not None and self._arrival is not None
        self._staging.before_reading(self._arrival)
        return self._arrival

    def _send(self) -> float:
        """In a worker of the staging, which is not the agent: so without a time limit."""
        job = self._engine.submit(self._stages)
        while not self._engine.wait(job, 0.5):
            pass
        if job.error:
            raise MPI.Exception(job.error)
        return job.done_s


def _through(job: Job | None) -> bool:
    return job is not None and job.done and not job.error


class Timing:
    """Of a flight that was waited for.

    On a device the host runs ahead of the work: when it comes to the wait, and how long it stays
    there, says nothing about the device. So events are recorded, and read when they have come.
    """

    def __init__(self, staging: Staging | None) -> None:
        self._staging = None if staging is None or staging.device.is_host else staging
        self._start_s = time.perf_counter()
        self._start = self._staging.mark(timing=True) if self._staging else None

    def end(self, through: float | Arrival) -> None:
        self._end_s = time.perf_counter()
        self._through = through
        self._end = self._staging.mark(timing=True) if self._staging else None

    def known(self) -> bool:
        return self._end is None or self._end.query()

    def read(self, posted_s: float) -> tuple[float, float, float, float]:
        """Posted, completed, and from when to when the agent stood waiting."""
        if not isinstance(self._through, Arrival):
            return posted_s, self._through, self._start_s, self._end_s
        arrival = self._through
        if self._start is None or self._end is None:
            return posted_s, arrival.through_s, self._start_s, self._end_s
        self._end.synchronize()
        completed = arrival.through_s + arrival.begun.elapsed_time(arrival.arrived) / 1e3
        stood = self._start.elapsed_time(self._end) / 1e3
        return arrival.posted_s, completed, self._end_s - stood, self._end_s


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
        timing = Timing(self._memory.staging)
        timing.end(self._complete())
        self.waited = True
        self.transport.add_untimed(timing, self._record)

    def move(self) -> None:  # noqa: B027
        """Without threads: go as far as possible without waiting."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def waits_for(self, over: bool) -> str:
        """Names who is late."""

    @abstractmethod
    def _complete(self) -> float | Arrival:
        """Wait until all is here; when it was through, or how it came to the device."""

    def end(self) -> None:
        self.transport._open.remove(self)
        self._memory.busy = False

    def drop(self) -> None:
        """End it, complete but not used."""
        self.end()

    def _record(self, timing: Timing) -> None:
        posted, completed, start, end = timing.read(self.posted)
        trace, r = self.transport.trace, self.round
        named = {"fragment": self.part} if self.part else {}
        if trace is not None:
            trace.span(
                self.track, self.kind, posted, completed, round=r, lane=self.lane,
                share=self.share, **named,
            )  # fmt: skip
        if self.kind == "evaluate":
            return
        self.transport.add_record(
            FlightRecord(self.kind, r, posted, completed, end - start, self.left_out, self.share)
        )
        if trace is not None:
            trace.span("wait", self.kind, start, end, round=r, **named)
