"""All n agents in one process: x is (n, d), time is virtual, messages are rows of a snapshot.

Row i is mixed by the same code, in the same order, as rank i does over MPI, so the two
transports agree bit for bit.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .. import ops
from ..topology import Topology
from ..transport.base import (
    Flight,
    FlightRecord,
    Pending,
    Reduction,
    Transport,
    Wire,
    ring_chunks,
    ring_mean,
)
from ..transport.late import Bools, Edges, Ints, Late, decide
from ..transport.narrow import Stream
from .clock import Clock, Times


class StackedTransport(Transport):
    def __init__(
        self,
        topology: Topology,
        clock: Clock | None = None,
        wire: Wire = None,
        late: Late | None = None,
    ) -> None:
        super().__init__(topology, wire=wire)
        self.late = late
        self.left_out: dict[tuple[int, int, int], Ints] = {}
        """(lane, phase, fragment) -> how many rounds in a row each edge was left out, in CSR order.

        A fragment is named by where it begins in x.
        """
        self.clock = clock or Clock(topology.n)
        self._graphs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._edges: dict[int, Edges] = {}
        self._spare: list[torch.Tensor] = []  # snapshots of finished flights, to be reused
        self._open: set[StackedFlight | StackedReduction] = set()

    def exchange(self, x: torch.Tensor, round: int, share: float = 1.0) -> StackedFlight:
        stream, cost = None, 1.0
        if self.streams is None:
            Y = self._snapshot(x, self.wire_type(x.dtype))
        else:
            stream = self.open_stream(x, round)
            Y, cost = self._public_copies(x, stream)
        if self.late is None:
            times = self.clock.post(self.topology, round, share * cost)
            flight = StackedFlight(self, x, Y, round, *times)
        else:
            taken = {f.lane for f in self._open if isinstance(f, LateFlight)}
            lane = next(k for k in itertools.count() if k not in taken)
            times = self.clock.send(self.topology, round, share * cost)
            flight = LateFlight(self, x, Y, round, *times, lane)
            flight.for_all = stream is not None and cost == 1.0
        flight.share, flight.stream = share, stream
        self._open.add(flight)
        return flight

    def _public_copies(self, x: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, float]:
        """Both ends of every edge have the same ones, so there is one of each agent.

        And how much the message costs of one that is whole, as the first one is.
        """
        assert self.streams is not None
        form, whole = stream.form, stream.z is None
        message = torch.empty(self.n, form.nbytes, dtype=torch.uint8, device=x.device)
        stream.take(x, message, self.streams.lost)
        assert stream.z is not None
        return stream.z, 1.0 if whole else form.share

    def all_reduce(self, x: torch.Tensor, round: int) -> StackedReduction:
        Y = self._snapshot(x, x.dtype)
        reduction = StackedReduction(self, Y, round, *self.clock.post_all_reduce())
        self._open.add(reduction)
        return reduction

    def snapshot_mean(self, x: torch.Tensor, round: int) -> StackedReduction:
        now = self.clock.t.copy()
        reduction = StackedReduction(self, self._snapshot(x, x.dtype), round, now, now)
        reduction._waited = True  # free: it stays out of the clock and the records
        self._open.add(reduction)
        return reduction

    def computed(self) -> None:
        self.clock.compute()

    def now(self) -> float:
        return float(self.clock.t.max())

    def reduce(self, values: NDArray[np.float64], op: Literal["sum", "max"] = "sum") -> Known:
        return Known(values)

    def close(self) -> None:
        self.drain()

    def drain(self) -> None:
        for flight in list(self._open):
            flight.wait()
            flight._end()

    def graph(self, round: int) -> tuple[torch.Tensor, ...]:
        """indptr, indices, weights, self weights of the round's W, as the row ops take them."""
        phase = round % self.topology.period
        if phase not in self._graphs:
            arrays = (*self.topology.csr(phase), self.topology.self_weights(phase))
            types = (np.int64, np.int64, np.float64, np.float64)
            self._graphs[phase] = tuple(
                torch.from_numpy(np.array(a, dtype=t)) for a, t in zip(arrays, types, strict=True)
            )
        return self._graphs[phase]

    def edges(self, round: int) -> Edges:
        phase = round % self.topology.period
        if phase not in self._edges:
            indptr, indices, _ = self.topology.csr(phase)
            self._edges[phase] = Edges.of(indptr, indices)
        return self._edges[phase]

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": {":".join(map(str, k)): v.tolist() for k, v in self.left_out.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left_out.clear()
        for key, counts in state.get("left_out", {}).items():
            lane, phase, *fragment = map(int, key.split(":"))  # older states name none
            self.left_out[lane, phase, sum(fragment)] = np.asarray(counts, dtype=np.int64)

    def _snapshot(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        for k, Y in enumerate(self._spare):
            if Y.shape == x.shape and Y.dtype == dtype:
                return self._spare.pop(k).copy_(x)
        return x.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


class Known(Pending):
    """All agents are in this process, so the caller's numbers are already the result."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        self._values = values

    def done(self) -> bool:
        return True

    def result(self) -> NDArray[np.float64]:
        return self._values


class _InFlight:
    """What a flight and a reduction share: a snapshot, and the times of every agent."""

    kind = "exchange"
    left_out = 0.0
    share = 1.0
    stream: Stream | None = None

    def __init__(
        self, transport: StackedTransport, Y: torch.Tensor, round: int, posted: Times, ready: Times
    ) -> None:
        self._transport = transport
        self._Y = Y
        self._round = round
        self._posted = posted
        self._ready = ready
        self._waited = False

    def wait(self) -> None:
        if self._waited:
            return
        self._waited = True
        exposed = self._transport.clock.wait(self._decide())
        self._transport.add_record(
            FlightRecord(
                self.kind,
                self._round,
                float(self._posted.mean()),
                float(self._ready.mean()),
                float(exposed.mean()),
                self.left_out,
                self.share,
            )
        )

    def _decide(self) -> Times:
        """When each agent goes on."""
        return self._ready

    def _end(self) -> None:
        self._transport._open.discard(self)
        if self.stream is None:
            self._transport._spare.append(self._Y)
        else:
            self.stream.end()


class StackedFlight(_InFlight, Flight):
    """It always copies x, so `snapshot` changes nothing here."""

    def __init__(
        self,
        transport: StackedTransport,
        x: torch.Tensor,
        Y: torch.Tensor,
        round: int,
        posted: Times,
        ready: Times,
    ) -> None:
        _InFlight.__init__(self, transport, Y, round, posted, ready)
        Flight.__init__(self, x, transport.tail)

    def mix_into(
        self,
        x: torch.Tensor,
        *,
        snapshot: bool = False,
        also: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        self.wait()
        transport = self._transport
        indptr, indices, weights, _ = self._graph()
        measure = transport.measure_distance
        tail = self._mixed_tail(x, indptr, indices, weights)
        if also is not None:
            z, factor = also
            kept = z[:, -tail.shape[1] :].clone() if tail is not None else None
            ops.mix_rows_delta(z, self._Y, indptr, indices, weights * factor)
            if kept is not None:
                z[:, -kept.shape[1] :] = kept
        distance = ops.mix_rows_delta(x, self._Y, indptr, indices, weights, distance=measure)
        if tail is not None:
            x[:, -tail.shape[1] :] = tail
        if distance is not None:
            transport.add_distance(x, distance)
        self._end()

    def mix(
        self,
        out: torch.Tensor,
        acc: torch.Tensor | None = None,
        alpha: float = 0.0,
        *,
        zero_acc: bool = False,
        snapshot: bool = False,
    ) -> torch.Tensor:
        self.wait()
        indptr, indices, weights, own = self._graph()
        ops.mix_rows(out, self._Y, indptr, indices, own, weights, acc, alpha)
        if acc is not None and zero_acc:
            acc.zero_()
        self._end()
        return out

    def _mixed_tail(self, x: torch.Tensor, *graph: torch.Tensor) -> torch.Tensor | None:
        """As over MPI: what the end of X becomes where it holds averages that fade."""
        faded = self.faded(x)
        if faded is None:
            return None
        start, left = faded
        Y = self._Y[:, start:].contiguous()
        e = torch.zeros(Y.shape, dtype=x.dtype, device=x.device)
        ops.mix_rows_delta(e, Y, *graph)
        return x[:, start:] + e.mul_(left)

    def _graph(self) -> tuple[torch.Tensor, ...]:
        return self._transport.graph(self._round)


class LateFlight(StackedFlight):
    """A flight that leaves out edges whose messages are late, on both sides of each."""

    def __init__(
        self,
        transport: StackedTransport,
        x: torch.Tensor,
        Y: torch.Tensor,
        round: int,
        posted: Times,
        through: Times,
        lane: int,
    ) -> None:
        ready = posted.copy()
        np.maximum.at(ready, transport.topology.csr(round)[1], through)
        super().__init__(transport, x, Y, round, posted, ready)
        self.lane, self._fragment = lane, int(x.storage_offset())
        self._through = through
        self.for_all = False  # no edge is left out
        self.used: Bools = np.ones(len(through), dtype=bool)

    def _decide(self) -> Times:
        transport, late = self._transport, self._transport.late
        assert late is not None
        key = self.lane, self._round % transport.topology.period, self._fragment
        counts = transport.left_out.get(key, np.zeros(len(self._through), dtype=np.int64))
        must = (counts >= late.staleness) | self.for_all
        edges = transport.edges(self._round)
        self.used, leave = decide(edges, transport.clock.t, self._through, late.wait, must)
        transport.left_out[key] = np.where(self.used, 0, counts + 1)
        self.left_out = float((~self.used).sum()) / transport.n
        return leave

    def _graph(self) -> tuple[torch.Tensor, ...]:
        indptr, indices, weights, own = super()._graph()
        if self.used.all():
            return indptr, indices, weights, own
        used = torch.from_numpy(self.used)
        owner = torch.from_numpy(self._transport.edges(self._round).owner)
        own = own.index_add(0, owner[~used], weights[~used])
        degree = torch.bincount(owner[used], minlength=len(own))
        starts = torch.cat([indptr[:1], degree.cumsum(0)])
        return starts, indices[used], weights[used], own


class StackedReduction(_InFlight, Reduction):
    kind = "all_reduce"

    def done(self) -> bool:
        return True

    def mean(self, out: torch.Tensor) -> torch.Tensor:
        self.wait()
        n, d = self._Y.shape
        sizes = torch.tensor([b - a for a, b in ring_chunks(d, n)])
        first = torch.arange(n).repeat_interleave(sizes).unsqueeze(0)  # which agent starts column k
        out.copy_(ring_mean(lambda step: self._Y.gather(0, (first + step) % n), n).expand(n, d))
        self._end()
        return out
