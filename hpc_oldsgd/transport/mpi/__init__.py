"""One agent per MPI rank: persistent messages between neighbours, moved while it computes."""

from __future__ import annotations

import atexit
import ctypes
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from ... import ops
from ...errors import NeighbourTimeout, UserError
from ...launch.launcher import check_world
from ...launch.openmpi import FRAGMENT, too_late
from ...topology import Topology
from ..base import Transport, Wire
from ..device import device_of
from ..heartbeat import Board, named
from ..late import Late
from ..progress import PERIOD_S, Engine, Job, PythonEngine
from ..staging import Staging
from ..trace import Trace
from . import narrow_exchange
from .all_reduce import MpiPending, MpiReduction, Ring
from .collectives import broadcast, gather_text
from .cuda_probe import cuda_aware
from .exchange import Channel, MpiFlight, WaitingChannel
from .in_flight import InFlight, Timing
from .job import Startup, abort_on_error, end_job, vendor, world
from .late_exchange import LateChannel
from .notices import Notices
from .requests import Progress, choose_progress, make_engine

StagingMode = Literal["auto", "direct", "host"]
AllReduce = Literal["ring", "mpi"]
__all__ = ["MpiTransport", "Notices", "Startup", "end_job", "world"]
LARGEST_MESSAGE_BYTES = 1 << 30
CAPTURED = (
    "messages cannot leave from inside a CUDA graph, which records only what the GPU does: capture "
    "forward and backward alone, and call agent.step() after the replay"
)
WaitsFor = Callable[[bool], str]
"""Names who is late. It is given True once the limit is over: then looking may take its time."""


class MpiTransport(Transport):
    """Agent `rank` of `topology` on a communicator; x is (d,), on the host or on a device."""

    def __init__(
        self,
        comm: MPI.Comm,
        topology: Topology,
        *,
        wire: Wire = None,
        progress: Progress = "auto",
        staging: StagingMode = "auto",
        all_reduce: AllReduce = "ring",
        timeout_s: float | None = None,
        largest_message_bytes: int = LARGEST_MESSAGE_BYTES,
        native: bool | None = None,
        trace: Trace | None = None,
        late: Late | None = None,
    ) -> None:
        super().__init__(topology, trace, wire)
        for name, given, known in (
            ("progress", progress, get_args(Progress)),
            ("staging", staging, get_args(StagingMode)),
            ("all_reduce", all_reduce, get_args(AllReduce)),
        ):
            if given not in known:
                raise UserError(f"{name} is one of {', '.join(known)}, not {given!r}")
        check_world(MPI.COMM_WORLD.size)
        if topology.n != comm.size:
            raise UserError(
                f"the topology has {topology.n} agents, the communicator {comm.size} ranks"
            )
        abort_on_error(comm)
        self.comm = comm.Dup()  # our tags and collectives meet nobody else's
        self.rank = comm.rank
        self.hosts = gather_text(self.comm, self.status.host, timeout_s)
        if too_late and self.rank == 0 and len(set(self.hosts)) > 1 and "Open MPI" in vendor():
            warnings.warn(
                "mpi4py.MPI was imported before hpc_oldsgd: over TCP Open MPI will hide less; "
                f"import hpc_oldsgd first, or set {FRAGMENT}=131072",
                stacklevel=2,
            )
        self.board: Board | None = None
        """Shows what a late rank was doing."""
        self.timeout_s = timeout_s
        self.largest_message_bytes = largest_message_bytes
        self.all_reduce_by = all_reduce
        self.progress = choose_progress(progress)
        self.native = ops.native_available() if native is None else native
        self.engine = self.make_engine()
        self.late = late
        if late is not None:
            self.late_engine = PythonEngine(self.progress == "thread")
        self._staging_mode = staging
        self.staging: Staging | None = None
        self._channels: list[Channel] = []
        self._rings: list[Ring] = []
        self._open: list[InFlight] = []
        self._untimed: deque[tuple[Timing, Callable[[Timing], None]]] = deque()
        self._numbers: list[MpiPending] = []  # MPI writes into them until they are done
        self._next_poll_s = 0.0
        self.shrunk = False  # ranks have died, the others went on
        self.kept_alive: list[Any] = []
        """Buffers that a communicator of the dead may still own."""
        self.look: Callable[[], None] | None = None
        """Called about twice a second while this rank waits; it may raise."""
        self.closed = False
        _not_closed.add(self)

    # -- the contract --------------------------------------------------------------------------

    def exchange(self, x: torch.Tensor, round: int, share: float = 1.0) -> MpiFlight:
        self._check_may_send(x)
        flight: MpiFlight
        if self.streams is not None:
            flight = narrow_exchange.exchange(self, x, round, share)
        else:
            flight = self._channel(x).exchange(x, round, share)
        self._open.append(flight)
        return flight

    def all_reduce(self, x: torch.Tensor, round: int) -> MpiReduction:
        self._check_may_send(x)
        ring = next((r for r in self._rings if r.fits(x)), None)
        if ring is None:
            ring = Ring(self, x, len(self._rings))
            self._rings.append(ring)
        reduction = MpiReduction(ring, x, round)
        self._open.append(reduction)
        return reduction

    def snapshot_mean(self, x: torch.Tensor, round: int) -> MpiReduction:
        reduction = self.all_reduce(x, round)
        reduction.kind = reduction.track = "evaluate"
        reduction.lane += 1  # lane 0 is the measuring
        return reduction

    def computed(self) -> None:
        self.poll()

    def now(self) -> float:
        return time.perf_counter()

    def reduce(self, values: NDArray[np.float64], op: Literal["sum", "max"] = "sum") -> MpiPending:
        self._check_open()
        pending = MpiPending(self, values, MPI.SUM if op == "sum" else MPI.MAX)
        self._numbers = [p for p in self._numbers if not p.done()] + [pending]
        return pending

    def barrier(self) -> float:
        """Blocking: all ranks leave at about the same time, which is returned."""
        self.everywhere(0.0).result()
        return time.perf_counter()

    def watch(self, run: Path) -> None:
        """Leave this rank's status in the run's folder, where the others find it when it is late.

        Without a limit on waits nobody would look.
        """
        self.stop_watching()
        if self.timeout_s is not None:
            self.board = Board(run, self.rank, self.n, self.status, self.timeout_s)

    def stop_watching(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None

    def gather_text(self, text: str) -> list[str]:
        return gather_text(self.comm, text, self.timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Blocking, in place; for the start of a run."""
        broadcast(self.comm, tensor, root, self.largest_message_bytes, self.timeout_s)

    def drain(self) -> None:
        for flight in list(self._open):
            flight.wait()
            flight.drop()
        for channel in self._channels:
            channel.drain()
        for pending in self._numbers:
            pending.result()
        self._numbers = []
        self.settle_times(True)

    def free_memory(self) -> None:
        for memory in (*self._channels, *self._rings):
            memory.free()
        self._channels, self._rings = [], []
        if self.streams is not None:
            self.streams.forget()

    def close(self) -> None:
        if self.closed:
            return
        self.drain()
        self.closed = True
        _not_closed.discard(self)
        if self.staging is not None:
            self.staging.stop()
        self.stop_engines()
        for memory in (*self._channels, *self._rings):
            memory.free()
        if not self.shrunk:
            self.comm.Free()

    # -- inside --------------------------------------------------------------------------------

    def count_open(self) -> int:
        """Flights that were begun and not waited for."""
        return len(self._open)

    def _check_open(self) -> None:
        if self.closed:
            raise UserError("the agent has finished and sends no more: take mean() before finish()")

    def _check_may_send(self, x: torch.Tensor) -> None:
        self._check_open()
        if device_of(x.device).capturing():
            raise UserError(CAPTURED)

    def make_engine(self) -> Engine:
        return make_engine(self.native, self.progress == "thread")

    def _engines(self) -> list[Engine]:
        return [self.engine] if self.late is None else [self.engine, self.late_engine]

    def stop_engines(self) -> None:
        for engine in self._engines():
            engine.stop()

    def poll(self) -> None:
        """Move messages from the training thread, about once a millisecond at most."""
        if self.progress != "thread":
            now = time.perf_counter()
            if now >= self._next_poll_s and self._may_call():
                for flight in self._open:
                    flight.move()
                if self.progress == "poll":
                    self.engine.poll()
                    if self.late is not None:
                        self.late_engine.poll()
                self._next_poll_s = time.perf_counter() + PERIOD_S

    def _may_call(self) -> bool:
        """A device's backward pass calls from autograd's thread, which not every MPI allows."""
        return MPI.Query_thread() >= MPI.THREAD_SERIALIZED or MPI.Is_thread_main()

    def add_untimed(self, timing: Timing, record: Callable[[Timing], None]) -> None:
        """`record` is called when the times are known: now, unless they are a device's."""
        self._untimed.append((timing, record))
        self.settle_times(False)

    def settle_times(self, wait: bool) -> None:
        while self._untimed and (wait or self._untimed[0][0].known()):
            timing, record = self._untimed.popleft()
            record(timing)

    def await_job(self, job: Job, waits_for: WaitsFor) -> None:
        """Return when the job is done. The thread waits on an event, never inside MPI."""
        self.await_done(lambda seconds: self.engine.wait(job, seconds), waits_for)
        if job.error:
            raise MPI.Exception(job.error)

    def await_done(self, done: Callable[[float], bool], waits_for: WaitsFor) -> None:
        start, status = time.perf_counter(), self.status
        while not self._done_within(0.5, done):
            waited = time.perf_counter() - start
            over = self.timeout_s is not None and waited > self.timeout_s
            if self.look is not None:
                self.look()
            status.waits(waits_for(over), waited)
            if over:
                raise NeighbourTimeout(
                    f"{self.named([self.rank])} has waited {waited:.0f} s for {status.waits_for}",
                    self.board.everybody() if self.board is not None else "",
                )
        status.waits_for = ""

    def _done_within(self, seconds: float, done: Callable[[float], bool]) -> bool:
        if self.progress == "thread" or self.staging is None:
            return done(seconds)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for flight in self._open:  # others may wait for what a device has copied meanwhile
                flight.move()
            if done(PERIOD_S):
                return True
        return False

    def named(self, ranks: Sequence[int]) -> str:
        return named(ranks, self.hosts)

    def _channel(self, x: torch.Tensor) -> Channel:
        free = [c for c in self._channels if c.fits(x)]
        # The one into which the last mix has written a snapshot of x, be it current or not: so
        # every rank makes the same choice.
        channel = next((c for c in free if c.has_kept(x)), free[0] if free else None)
        if channel is None:
            kind = WaitingChannel if self.late is None else LateChannel
            channel = kind(self, x, len(self._channels))
            self._channels.append(channel)
        return channel

    def staging_for(self, device: torch.device) -> Staging | None:
        """None where MPI reads the tensors themselves.

        On the CPU `direct` and `host` run when asked for, so that a device's code is tested there.
        """
        mode, here = self._staging_mode, device_of(device)
        if here.is_host and mode == "auto":
            return None
        if self.staging is None:
            for engine in self._engines():
                engine.work_with(here)
            if mode == "auto":
                mode = "direct" if cuda_aware(self.comm, device, self.engine) else "host"
            self.staging = Staging(here, copies=mode == "host")
        return self.staging


_not_closed: set[MpiTransport] = set()
"""Kept alive if an Agent is dropped unfinished: MPI still reads and writes their buffers."""


@atexit.register
def _stop_before_finalize() -> None:
    """MPI_Finalize completes what is open: no other thread may call MPI then, and every buffer must
    still be there."""
    for transport in _not_closed:
        transport.stop_engines()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))
