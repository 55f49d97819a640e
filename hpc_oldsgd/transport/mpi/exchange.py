"""A model-sized message to every neighbour over MPI, in buffers and requests made once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ... import ops
from ..base import Flight, FlightRecord
from ..progress import Job, Stage
from ..staging import Staging
from .requests import PersistentRequests, as_bytes, pieces

if TYPE_CHECKING:
    from . import MpiTransport


class Channel:
    """The buffers and requests of one flight at a time, made once and used every round.

    `y` is ours from the end of one flight to the start of the next, MPI's in between; so are the
    received snapshots.
    """

    def __init__(self, transport: MpiTransport, x: torch.Tensor, tag: int) -> None:
        self.transport = transport
        self.tag = tag
        self.busy = False
        self.fresh: tuple[torch.Tensor, int] | None = None
        self._model = (x.shape, x.dtype, x.device)
        wire = transport.wire or x.dtype
        self.y = torch.empty(x.shape, dtype=wire, device=x.device)
        self.staging = transport.staging_for(x.device)
        self.y_host = self.staging.host(self.y) if self.staging else self.y
        self.received: list[torch.Tensor] = []
        self.received_host: list[torch.Tensor] = []
        self._requests: dict[int, PersistentRequests] = {}

    def fits(self, x: torch.Tensor) -> bool:
        return self._model == (x.shape, x.dtype, x.device)

    def holds(self, x: torch.Tensor) -> bool:
        return self.fresh is not None and self.fresh[0] is x and self.fresh[1] == x._version

    def next_y(self) -> torch.Tensor:
        """Where the next snapshot goes."""
        return self.y

    def requests(self, round: int) -> PersistentRequests:
        """Those of this round's graph; a time-varying graph has a set for each of its phases."""
        topology, t = self.transport.topology, self.transport
        phase = round % topology.period
        if phase not in self._requests:
            receives, sends = [], []
            neighbours = topology.neighbours(t.rank, round)
            while len(self.received) < len(neighbours):
                self.received.append(torch.empty_like(self.y))
                arrives = self.received[-1]
                self.received_host.append(self.staging.host(arrives) if self.staging else arrives)
            for (j, _), buffer in zip(neighbours, self.received_host, strict=False):
                for piece in pieces(buffer, t.largest_message_bytes):
                    receives.append(t.comm.Recv_init(as_bytes(piece), j, self.tag))
            for j, _ in neighbours:
                for piece in pieces(self.y_host, t.largest_message_bytes):
                    sends.append(t.comm.Send_init(as_bytes(piece), j, self.tag))
            self._requests[phase] = PersistentRequests(receives, sends)
        return self._requests[phase]

    @property
    def made(self) -> int:
        """Persistent requests so far."""
        return sum(requests.native[2] for requests in self._requests.values())

    def free(self) -> None:
        for requests in self._requests.values():
            requests.free()


class InFlight(ABC):
    """What an exchange and a reduction share: a job under way, or a staged one, and its times."""

    kind = "exchange"
    track = "flight"

    def __init__(self, transport: MpiTransport, round: int, lane: int) -> None:
        self.transport = transport
        self.round = round
        self.lane = lane
        self.job: Job | None = None
        self.staged: Future[tuple[float, Any]] | None = None
        self.waited = False
        self.posted = time.perf_counter()

    def launch(
        self,
        stages: list[Stage],
        staging: Staging | None,
        out: list[tuple[torch.Tensor, torch.Tensor]],
        back: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        engine = self.transport.engine
        self._stages = stages  # the native engine reads MPI's handles in them
        if staging is None:
            self.job = engine.submit(stages)
        elif engine.threaded:

            def send() -> float:
                job = self.job = engine.submit(stages)
                while not engine.wait(job, 0.5):
                    pass  # the limit is for who stands waiting, and this worker is not the agent
                if job.error:
                    raise MPI.Exception(job.error)
                return job.done_s

            self.staged = staging.fly(out, back, send)
        else:
            # Without MPI_THREAD_MULTIPLE only this thread may call MPI: copy out now, back later.
            staging.fly(out, [], float).result()
            self.job = engine.submit(stages)
            self._staging, self._back = staging, back

    @abstractmethod
    def waits_for(self, over: bool) -> str: ...

    def done(self) -> bool:
        if self.staged is not None:
            return self.staged.done()
        return self.job is not None and self.job.done

    def wait(self) -> None:
        if self.waited:
            return
        start = time.perf_counter()
        if self.staged is not None:
            staged = self.staged
            self.transport.await_done(
                lambda seconds: bool(wait_for([staged], seconds).done), self.waits_for
            )
            completed, arrived = staged.result()
            assert self.transport.staging is not None
            self.transport.staging.before_reading(arrived)
        else:
            assert self.job is not None
            self.transport.await_job(self.job, self.waits_for)
            completed = self.job.done_s
            if hasattr(self, "_back"):
                self._staging.before_reading(self._staging.fly(self._back, [], float).result()[1])
        self.waited = True
        self._record(start, completed)

    def _record(self, start: float, completed: float, left_out: int = 0) -> None:
        end = time.perf_counter()
        if self.kind != "evaluate":
            self.transport.records.append(
                FlightRecord(self.kind, self.round, self.posted, completed, end - start, left_out)
            )
        trace = self.transport.trace
        if trace is not None:
            trace.span(
                self.track, self.kind, self.posted, completed, round=self.round, lane=self.lane
            )
            if self.kind != "evaluate":
                trace.span("wait", self.kind, start, end, round=self.round)

    def _end(self) -> None:
        self.transport._open.remove(self)
        self.free()

    @abstractmethod
    def free(self) -> None: ...


class MpiFlight(InFlight, Flight):
    def __init__(self, transport: MpiTransport, channel: Channel, round: int) -> None:
        super().__init__(transport, round, lane=channel.tag)
        self.channel = channel
        channel.busy = True
        neighbours = transport.topology.neighbours(transport.rank, round)
        self.neighbours = [j for j, _ in neighbours]
        self.weights = [transport.topology.self_weight(transport.rank, round)]
        self.weights += [w for _, w in neighbours]
        self.requests = channel.requests(round)
        degree = len(neighbours)
        self.received = channel.received[:degree]
        self.launch(
            [Stage(self.requests)],
            channel.staging,
            out=[(channel.y_host, channel.y)],
            back=list(zip(self.received, channel.received_host, strict=False)),
        )

    def mix_into(self, x: torch.Tensor, *, resend: bool = False) -> None:
        self.wait()
        start = time.perf_counter()
        y = self.channel.y
        y_next = self.channel.next_y() if resend else None
        measure = self.transport.measure_distance
        statistics = self._statistics(x, y)
        distance = ops.fused_mix_delta(
            x, y, self.received, self.weights, y_next=y_next, distance=measure
        )
        if statistics is not None:
            for buffer in (x, y_next) if y_next is not None else (x,):
                buffer[-len(statistics) :] = statistics
        if measure:
            self.transport.distance = distance
        self._mixed(x, resend, start)

    def _statistics(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """What the end of x becomes, where it holds statistics that have forgotten of y."""
        running = self.transport.running
        if running is None or self.since is None or x is not self.sent():
            return None
        k = running.start
        e = torch.zeros_like(x[k:])
        ops.fused_mix_delta(e, y[k:], [one[k:] for one in self.received], self.weights)
        return x[k:] + e.mul_(running.left(self.since)[0])

    def mix(
        self,
        out: torch.Tensor,
        acc: torch.Tensor | None = None,
        alpha: float = 0.0,
        *,
        zero_acc: bool = False,
        resend: bool = False,
    ) -> torch.Tensor:
        self.wait()
        start = time.perf_counter()
        y = self.channel.y
        y_next = self.channel.next_y() if resend else None
        ops.fused_mix(
            out, y, self.received, self.weights, acc, alpha, y_next=y_next, zero_acc=zero_acc
        )
        self._mixed(out, resend, start)
        return out

    def _mixed(self, x: torch.Tensor, resend: bool, start: float) -> None:
        self._end()
        if resend:
            self.channel.fresh = (x, x._version)
        if self.transport.trace is not None:
            self.transport.trace.span("mix", "mix", start, time.perf_counter(), round=self.round)

    def waits_for(self, over: bool) -> str:
        late = [
            j
            for k, j in enumerate(self.neighbours)
            if not (
                self._through(self.requests.receives, k) and self._through(self.requests.sends, k)
            )
        ]
        return f"{self.transport.named(late)} in round {self.round}"

    def _through(self, requests: list[Any], k: int) -> bool:
        """All pieces of the message from, or to, the k-th neighbour."""
        per = len(requests) // len(self.neighbours)
        return all(request.Get_status() for request in requests[k * per : (k + 1) * per])

    def free(self) -> None:
        self.channel.busy = False
