"""Averages over all agents by a ring all-reduce, and a few numbers by MPI's own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from ..base import Pending, Reduction, ring_chunks, sum_type
from ..device import device_of
from ..progress import Stage
from ..staging import Arrival
from .in_flight import InFlight, Memory, StagedJob
from .requests import PersistentRequests, StartedRequest, as_bytes, pieces

if TYPE_CHECKING:
    from . import MpiTransport

TAG_RING = 30_000  # exchanges use the channel's number


class Ring(Memory):
    """For one ring all-reduce at a time: n - 1 steps that add, n - 1 that copy.

    Chunk k is summed from rank k on, around the ring, so every run adds in the same order.
    """

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int) -> None:
        super().__init__(transport, x, number)
        t = transport
        # Host memory, whatever MPI can read: the engine adds on the host.
        self.total = device_of(x.device).pinned(x.shape, sum_type(x.dtype))
        bounds = ring_chunks(x.numel(), t.n)
        self.incoming = torch.empty(bounds[0][1], dtype=self.total.dtype)
        self._sets: list[PersistentRequests] = []
        self.stages: list[Stage] = []
        left, right, tag = (t.rank - 1) % t.n, (t.rank + 1) % t.n, TAG_RING + number
        # MPI's own starts at once, on the caller's thread: not with data that is yet to be staged.
        if t.all_reduce_by == "mpi" and self.staging is None:
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

    def started(self) -> list[Stage]:
        if self.stages or self.transport.n == 1:
            return self.stages
        array = self.total.numpy()
        request = self.transport.comm.Iallreduce(MPI.IN_PLACE, array)
        return [Stage(StartedRequest(request), start=False)]

    def free(self) -> None:
        for requests in self._sets:
            requests.free()


class MpiReduction(InFlight, Reduction):
    kind = "all_reduce"
    track = "reduce"

    def __init__(self, ring: Ring, x: torch.Tensor, round: int) -> None:
        super().__init__(ring, round)
        self.ring = ring
        if ring.staging is None:
            ring.total.copy_(x)
        out = [(ring.total, x.detach().clone())] if ring.staging else []
        self._job = StagedJob(ring, ring.started(), out)

    def mean(self, out: torch.Tensor) -> torch.Tensor:
        self.wait()
        start = time.perf_counter()
        out.copy_(self.ring.total.div_(self.transport.n), non_blocking=True)
        self.end()
        if self.transport.trace is not None and self.kind != "evaluate":
            self.transport.trace.span("mix", "mean", start, time.perf_counter(), round=self.round)
        return out

    def done(self) -> bool:
        return self._job.done()

    def move(self) -> None:
        self._job.move()

    def _complete(self) -> float | Arrival:
        return self._job.wait(self.waits_for)

    def waits_for(self, over: bool) -> str:
        left = (self.transport.rank - 1) % self.transport.n
        return f"{self.transport.named([left])} in the all-reduce of round {self.round}"


class MpiPending(Pending):
    """A few numbers reduced over all ranks in the background."""

    def __init__(self, transport: MpiTransport, values: NDArray[np.float64], op: MPI.Op) -> None:
        self._transport = transport
        transport.status.reductions += 1
        self._number = transport.status.reductions
        self._sent = np.ascontiguousarray(values, dtype=np.float64)
        self._result = np.empty_like(self._sent)
        self._request = transport.comm.Iallreduce(self._sent, self._result, op)
        self._job = transport.engine.submit([Stage(StartedRequest(self._request), start=False)])

    def done(self) -> bool:
        return self._job.done

    def result(self) -> NDArray[np.float64]:
        start = time.perf_counter()
        self._transport.await_job(self._job, self._waits_for)
        if self._transport.trace is not None:
            self._transport.trace.span("wait", "numbers", start, time.perf_counter())
        return self._result

    def _waits_for(self, over: bool) -> str:
        board = self._transport.board
        late = board.late(self._number) if over and board is not None else []
        who = self._transport.named(late) if late else "all ranks"
        return f"{who} to vote or sum"
