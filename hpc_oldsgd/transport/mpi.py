"""One agent per MPI rank: persistent messages between neighbours, moved while it computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Literal

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from .. import ops
from ..errors import NeighbourTimeout, UserError
from ..topology import Topology
from ..trace import Trace
from .base import Flight, FlightRecord, Pending, Reduction, Transport, ring_chunks
from .mpi_requests import (  # the other file that says MPI
    PersistentRequests,
    StartedRequest,
    Startup,
    abort_on_error,
    as_bytes,
    functions,
    gather_text,
    pieces,
    sizes,
)
from .probe import cuda_aware
from .progress import PERIOD_S, Engine, Job, NativeEngine, PythonEngine, Stage
from .staging import Staging

Progress = Literal["auto", "thread", "poll", "none"]
StagingMode = Literal["auto", "direct", "host"]
__all__ = ["MpiTransport", "Startup", "world"]
LARGEST_MESSAGE_BYTES = 1 << 30
TAG_RING = 30_000  # exchanges use the channel's number


class MpiTransport(Transport):
    """Agent `rank` of `topology` on a communicator; x is (d,), on the host or on a device."""

    def __init__(
        self,
        comm: MPI.Comm,
        topology: Topology,
        *,
        wire: torch.dtype | None = None,
        progress: Progress = "auto",
        staging: StagingMode = "auto",
        all_reduce: Literal["ring", "mpi"] = "ring",
        timeout_s: float | None = None,
        largest_message_bytes: int = LARGEST_MESSAGE_BYTES,
        native: bool | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(topology, trace)
        if topology.n != comm.size:
            raise UserError(
                f"the topology has {topology.n} agents, the communicator {comm.size} ranks"
            )
        abort_on_error(comm)
        self.comm = comm.Dup()  # our tags and collectives meet nobody else's
        self.rank = comm.rank
        self.wire = wire
        self.timeout_s = timeout_s
        self.largest_message_bytes = largest_message_bytes
        self.all_reduce_by = all_reduce
        self.progress = choose_progress(progress)
        self.native = ops.native_available() if native is None else native
        self.engine: Engine
        if self.native:
            self.engine = NativeEngine(functions(), sizes(), self.progress == "thread")
        else:
            self.engine = PythonEngine(self.progress == "thread")
        self._staging_mode = staging
        self.staging: Staging | None = None
        self._channels: list[Channel] = []
        self._rings: list[Ring] = []
        self._open: list[_InFlight] = []
        self._numbers: list[MpiPending] = []  # MPI writes into them until they are done
        self._next_poll_s = 0.0
        self.closed = False

    # -- the contract --------------------------------------------------------------------------

    def exchange(self, x: torch.Tensor, round: int) -> MpiFlight:
        channel = self._channel(x)
        if not channel.holds(x):
            channel.y.copy_(x)
        channel.fresh = None
        flight = MpiFlight(self, channel, round)
        self._open.append(flight)
        return flight

    def all_reduce(self, x: torch.Tensor, round: int) -> MpiReduction:
        ring = next((r for r in self._rings if not r.busy and r.fits(x)), None)
        if ring is None:
            ring = Ring(self, x, len(self._rings))
            self._rings.append(ring)
        reduction = MpiReduction(self, ring, x, round)
        self._open.append(reduction)
        return reduction

    def snapshot_mean(self, x: torch.Tensor, round: int) -> MpiReduction:
        reduction = self.all_reduce(x, round)
        reduction.kind = reduction.track = "evaluate"
        reduction.lane += 1  # lane 0 is the measuring
        return reduction

    def computed(self) -> None:
        self.forget()  # the training loop may have changed x since
        self.poll()

    def now(self) -> float:
        return time.perf_counter()

    def reduce(self, values: NDArray[np.float64], op: Literal["sum", "max"] = "sum") -> MpiPending:
        pending = MpiPending(self, values, MPI.SUM if op == "sum" else MPI.MAX)
        self._numbers = [p for p in self._numbers if not p.done()] + [pending]
        return pending

    def gather_text(self, text: str) -> list[str]:
        return gather_text(self.comm, text)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Blocking, in place; for the start of a run."""
        host = tensor.detach().to("cpu").contiguous()
        for piece in pieces(host.view(-1), self.largest_message_bytes):
            self.comm.Bcast(as_bytes(piece), root)
        if host.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(host)

    def drain(self) -> None:
        for flight in list(self._open):
            flight.wait()
            flight._end()
        for pending in self._numbers:
            pending.result()
        self._numbers = []
        self.forget()

    def forget(self) -> None:
        """Snapshots that a mix has written are of no use: x is no longer what it was."""
        for channel in self._channels:
            channel.fresh = None

    def close(self) -> None:
        if self.closed:
            return
        self.drain()
        self.closed = True
        if self.staging is not None:
            self.staging.stop()
        self.engine.stop()
        for channel in self._channels:
            channel.free()
        for ring in self._rings:
            ring.free()
        self.comm.Free()

    # -- inside --------------------------------------------------------------------------------

    def poll(self) -> None:
        """Move messages from the training thread, about once a millisecond at most."""
        if self.progress == "poll":
            now = time.perf_counter()
            if now >= self._next_poll_s:
                self.engine.poll()
                self._next_poll_s = time.perf_counter() + PERIOD_S

    def await_job(self, job: Job, waits_for: Callable[[], str]) -> None:
        """Return when the job is done; the thread stands on an event, never inside MPI."""
        self.await_done(lambda seconds: self.engine.wait(job, seconds), waits_for)
        if job.error:
            raise MPI.Exception(job.error)

    def await_done(self, done: Callable[[float], bool], waits_for: Callable[[], str]) -> None:
        start = time.perf_counter()
        while not done(0.5):
            waited = time.perf_counter() - start
            if self.timeout_s is not None and waited > self.timeout_s:
                raise NeighbourTimeout(
                    f"rank {self.rank} has waited {waited:.0f} s for {waits_for()}"
                )

    def _channel(self, x: torch.Tensor) -> Channel:
        free = [c for c in self._channels if not c.busy and c.fits(x)]
        # The one whose snapshot the last mix has written already; the same choice on every rank.
        channel = next((c for c in free if c.holds(x)), free[0] if free else None)
        if channel is None:
            channel = Channel(self, x, tag=len(self._channels))
            self._channels.append(channel)
        return channel

    def staging_for(self, device: torch.device) -> Staging | None:
        """None where MPI reads the tensors themselves and nothing has to be waited for."""
        mode = self._staging_mode
        if device.type == "cpu" and mode != "host":
            return None
        if self.staging is None:
            if mode == "auto":
                mode = "direct" if cuda_aware(self.comm, device) else "host"
            self.staging = Staging(device, copies=mode == "host")
        return self.staging


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

    def requests(self, round: int) -> PersistentRequests:
        """Those of this round's graph; a time-varying graph has a set for each of its phases."""
        topology, t = self.transport.topology, self.transport
        phase = round % topology.period
        if phase not in self._requests:
            receives, sends = [], []
            neighbours = topology.neighbours(t.rank, round)
            while len(self.received) < len(neighbours):
                self.received.append(torch.empty_like(self.y))
                host = self.staging.host(self.y) if self.staging else self.received[-1]
                self.received_host.append(host)
            for (j, _), buffer in zip(neighbours, self.received_host, strict=False):
                for piece in pieces(buffer, t.largest_message_bytes):
                    receives.append(t.comm.Recv_init(as_bytes(piece), j, self.tag))
            for j, _ in neighbours:
                for piece in pieces(self.y_host, t.largest_message_bytes):
                    sends.append(t.comm.Send_init(as_bytes(piece), j, self.tag))
            self._requests[phase] = PersistentRequests(receives, sends)
        return self._requests[phase]

    def free(self) -> None:
        for requests in self._requests.values():
            requests.free()


class _InFlight:
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

    def waits_for(self) -> str:
        raise NotImplementedError

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
        end = time.perf_counter()
        if self.kind != "evaluate":
            record = FlightRecord(self.kind, self.round, self.posted, completed, end - start)
            self.transport.records.append(record)
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

    def free(self) -> None:
        raise NotImplementedError


class MpiFlight(_InFlight, Flight):
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
        measure = self.transport.measure_distance
        distance = ops.fused_mix_delta(
            x, y, self.received, self.weights, y_next=y if resend else None, distance=measure
        )
        if measure:
            self.transport.distance = distance
        self._mixed(x, resend, start)

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
        y_next = y if resend else None
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

    def waits_for(self) -> str:
        per = max(1, len(self.requests.receives) // max(1, len(self.neighbours)))
        late = [
            str(j)
            for k, j in enumerate(self.neighbours)
            if not all(r.Get_status() for r in self.requests.receives[k * per : (k + 1) * per])
        ]
        return f"rank {', '.join(late) or '(send)'} in round {self.round}"

    def free(self) -> None:
        self.channel.busy = False


class Ring:
    """Buffers and requests of a ring all-reduce: n - 1 steps that add, n - 1 that copy.

    Chunk k is summed from rank k on, around the ring, so every run adds in the same order.
    """

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int) -> None:
        t = self.transport = transport
        self.number = number
        self.busy = False
        self._model = (x.shape, x.dtype, x.device)
        self.staging = t.staging_for(x.device)
        # Host memory unless MPI takes the device's: the engine adds on the host.
        device = "cpu"
        self.total = torch.empty(x.shape, dtype=x.dtype, device=device)
        bounds = ring_chunks(x.numel(), t.n)
        self.incoming = torch.empty(bounds[0][1], dtype=x.dtype, device=device)
        self._sets: list[PersistentRequests] = []
        self.stages: list[Stage] = []
        left, right, tag = (t.rank - 1) % t.n, (t.rank + 1) % t.n, TAG_RING + number
        # MPI's own starts at once, on the caller's thread: not with data that is yet to be staged.
        own = t.all_reduce_by == "mpi" and self.staging is None
        if own and x.dtype in (torch.float32, torch.float64):
            return
        for step in range(2 * (t.n - 1)):
            adds = step < t.n - 1
            a, b = bounds[(t.rank - step) % t.n]
            source = self.total[a:b]
            a, b = bounds[(t.rank - step - 1) % t.n]
            target = self.total[a:b]
            into = self.incoming[: b - a] if adds else target
            limit = t.largest_message_bytes
            requests = PersistentRequests(
                [t.comm.Recv_init(as_bytes(p), left, tag) for p in pieces(into, limit)],
                [t.comm.Send_init(as_bytes(p), right, tag) for p in pieces(source, limit)],
            )
            self._sets.append(requests)
            self.stages.append(Stage(requests, add=(target, into) if adds else None))

    def fits(self, x: torch.Tensor) -> bool:
        return self._model == (x.shape, x.dtype, x.device)

    def started(self) -> list[Stage]:
        if self.stages or self.transport.n == 1:
            return self.stages
        array = self.total.numpy()
        request = self.transport.comm.Iallreduce(MPI.IN_PLACE, array)
        return [Stage(StartedRequest(request), start=False)]

    def free(self) -> None:
        for requests in self._sets:
            requests.free()


class MpiReduction(_InFlight, Reduction):
    kind = "all_reduce"
    track = "reduce"

    def __init__(self, transport: MpiTransport, ring: Ring, x: torch.Tensor, round: int) -> None:
        super().__init__(transport, round, lane=ring.number)
        self.ring = ring
        ring.busy = True
        if ring.staging is None:
            ring.total.copy_(x)
            self.launch(ring.started(), None, [], [])
        else:
            snapshot = x.detach().clone()
            self.launch(ring.started(), ring.staging, out=[(ring.total, snapshot)], back=[])

    def done(self) -> bool:
        if self.staged is not None:
            return self.staged.done()
        return self.job is not None and self.job.done

    def mean(self, out: torch.Tensor) -> torch.Tensor:
        self.wait()
        start = time.perf_counter()
        out.copy_(self.ring.total.div_(self.transport.n))
        self._end()
        if self.transport.trace is not None and self.kind != "evaluate":
            self.transport.trace.span("mix", "mean", start, time.perf_counter(), round=self.round)
        return out

    def waits_for(self) -> str:
        left = (self.transport.rank - 1) % self.transport.n
        return f"rank {left} in the all-reduce of round {self.round}"

    def free(self) -> None:
        self.ring.busy = False


class MpiPending(Pending):
    """A few numbers reduced over all ranks in the background."""

    def __init__(self, transport: MpiTransport, values: NDArray[np.float64], op: MPI.Op) -> None:
        self._transport = transport
        self._sent = np.ascontiguousarray(values, dtype=np.float64)
        self._result = np.empty_like(self._sent)
        self._request = transport.comm.Iallreduce(self._sent, self._result, op)
        self._job = transport.engine.submit([Stage(StartedRequest(self._request), start=False)])

    def done(self) -> bool:
        return self._job.done

    def result(self) -> NDArray[np.float64]:
        start = time.perf_counter()
        self._transport.await_job(self._job, lambda: "a reduction over all ranks")
        if self._transport.trace is not None:
            self._transport.trace.span("wait", "numbers", start, time.perf_counter())
        return self._result


def choose_progress(progress: Progress) -> Progress:
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    if progress == "auto":
        return "thread" if threads else "poll"
    if progress == "thread" and not threads:
        raise UserError(
            "progress=thread needs MPI_THREAD_MULTIPLE, which this MPI did not grant: use poll"
        )
    return progress


def world() -> MPI.Comm:
    return MPI.COMM_WORLD
