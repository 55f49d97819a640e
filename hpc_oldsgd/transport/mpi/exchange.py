"""A message to every neighbour over MPI, in buffers and requests made once.

Fragments of a model share them: the buffers are as long as the longest, and all of a buffer is
sent, fewer than two lines more than the fragment has.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from ...torch_private import UNKNOWN, version
from ..base import LINE, Flight
from ..progress import Stage
from ..staging import Arrival
from .in_flight import InFlight, Memory, StagedJob
from .requests import PersistentRequests, as_bytes, pieces

if TYPE_CHECKING:
    from . import MpiTransport


class Channel(Memory):
    """For one exchange at a time.

    The own snapshot `y` is ours from the end of one flight to the start of the next, MPI's in
    between; so are the received snapshots.
    """

    y: torch.Tensor
    """As long as the longest fragment; of a shorter one only the beginning counts."""

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int) -> None:
        super().__init__(transport, x, number)
        self._kept: weakref.ref[torch.Tensor] | None = None
        """The x of which a mix has written the snapshot into y."""
        self._kept_version = 0  # of that x, when the snapshot was written

    def fits(self, x: torch.Tensor) -> bool:
        (shape, dtype, device), size = self._model, x.numel()
        spare = shape.numel() - size
        return not self.busy and (dtype, device) == (x.dtype, x.device) and 0 <= spare < 2 * LINE

    def blank(self) -> torch.Tensor:
        shape, dtype, device = self._model
        return torch.empty(shape.numel(), dtype=self.transport.wire_type(dtype), device=device)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory that MPI uses in place of this tensor."""
        return self.staging.host(tensor) if self.staging else tensor

    def keep(self, x: torch.Tensor) -> None:
        """A mix has written the snapshot of x as it is now into y."""
        self._kept, self._kept_version = weakref.ref(x), version(x)

    def has_kept(self, x: torch.Tensor) -> bool:
        """Whether y is a snapshot of x; it may be out of date."""
        return self._kept is not None and self._kept() is x

    def exchange(self, x: torch.Tensor, round: int, share: float) -> MpiFlight:
        current = self.has_kept(x) and self._kept_version == version(x) != UNKNOWN
        if not current:
            self.next_y()[: x.numel()].copy_(x.reshape(-1))
        self._kept = None
        flight = self._fly(x, round)
        flight.share = share
        return flight

    @abstractmethod
    def next_y(self) -> torch.Tensor:
        """Where the next snapshot goes; it becomes `y`."""

    @abstractmethod
    def _fly(self, x: torch.Tensor, round: int) -> MpiFlight: ...

    @abstractmethod
    def drain(self) -> None:
        """Complete what outlives a flight. Collective."""

    @property
    @abstractmethod
    def made(self) -> int:
        """Persistent requests so far."""


class WaitingChannel(Channel):
    """For flights that wait for every neighbour."""

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int) -> None:
        super().__init__(transport, x, number)
        self.y = self.blank()
        self.y_host = self.host(self.y)
        self.received: list[torch.Tensor] = []
        self.received_host: list[torch.Tensor] = []
        self._requests: dict[int, PersistentRequests] = {}

    def next_y(self) -> torch.Tensor:
        return self.y

    def _fly(self, x: torch.Tensor, round: int) -> WaitingFlight:
        return WaitingFlight(self, x, round)

    def requests(self, round: int) -> PersistentRequests:
        """Those of this round's graph; a time-varying graph has a set for each of its phases."""
        topology, t = self.transport.topology, self.transport
        phase = round % topology.period
        if phase not in self._requests:
            receives, sends = [], []
            neighbours = topology.neighbours(t.rank, round)
            while len(self.received) < len(neighbours):
                self.received.append(torch.empty_like(self.y))
                self.received_host.append(self.host(self.received[-1]))
            for (j, _), buffer in zip(neighbours, self.received_host, strict=False):
                for piece in pieces(buffer, t.largest_message_bytes):
                    receives.append(t.comm.Recv_init(as_bytes(piece), j, self.number))
            for j, _ in neighbours:
                for piece in pieces(self.y_host, t.largest_message_bytes):
                    sends.append(t.comm.Send_init(as_bytes(piece), j, self.number))
            self._requests[phase] = PersistentRequests(receives, sends)
        return self._requests[phase]

    def drain(self) -> None:
        """Nothing does."""

    @property
    def made(self) -> int:
        return sum(requests.native[2] for requests in self._requests.values())

    def free(self) -> None:
        for requests in self._requests.values():
            requests.free()


class MpiFlight(InFlight, Flight):
    """An exchange with the neighbours; which of them are mixed is known once it is waited for."""

    received: list[torch.Tensor]

    def __init__(self, channel: Channel, x: torch.Tensor, round: int) -> None:
        transport = channel.transport
        InFlight.__init__(self, channel, round)
        Flight.__init__(self, x, transport.tail)
        self.channel = channel
        neighbours = transport.topology.neighbours(transport.rank, round)
        self.neighbours = [j for j, _ in neighbours]
        self.weights = [transport.topology.self_weight(transport.rank, round)]
        self.weights += [w for _, w in neighbours]

    def mix_into(
        self,
        x: torch.Tensor,
        *,
        snapshot: bool = False,
        also: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        self.wait()
        start = time.perf_counter()
        y, received = self._arrived(x)
        tail = self._mixed_tail(x, y, received)
        if also is not None:
            self._mix_also(*also, y, received, 0 if tail is None else len(tail))
        y_next = self.channel.next_y()[: x.numel()] if snapshot else None
        distance = ops.fused_mix_delta(
            x, y, received, self.weights, y_next=y_next, distance=self.transport.measure_distance
        )
        if tail is not None:
            for buffer in (x, y_next) if y_next is not None else (x,):
                buffer[-len(tail) :] = tail
        if distance is not None:
            self.transport.add_distance(x, distance)
        self._mixed(x, snapshot, start)

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
        start = time.perf_counter()
        y, received = self._arrived(out)
        y_next = self.channel.next_y()[: out.numel()] if snapshot else None
        ops.fused_mix(out, y, received, self.weights, acc, alpha, y_next=y_next, zero_acc=zero_acc)
        self._mixed(out, snapshot, start)
        return out

    def _arrived(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The own snapshot and the neighbours', as long as x."""
        d = x.numel()
        return self.channel.y[:d], [y[:d] for y in self.received]

    def _mixed_tail(
        self, x: torch.Tensor, y: torch.Tensor, received: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """What the end of x becomes where it holds averages that fade."""
        faded = self.faded(x)
        if faded is None:
            return None
        k, left = faded
        e = torch.zeros_like(x[k:])
        ops.fused_mix_delta(e, y[k:], [one[k:] for one in received], self.weights)
        return x[k:] + e.mul_(left[0])

    def _mix_also(
        self,
        z: torch.Tensor,
        factor: float,
        y: torch.Tensor,
        received: list[torch.Tensor],
        tail: int,
    ) -> None:
        weights = [w * factor for w in self.weights]
        kept = z[z.numel() - tail :].clone()
        ops.fused_mix_delta(z, y, received, weights)
        z[z.numel() - tail :] = kept

    def _mixed(self, x: torch.Tensor, snapshot: bool, start: float) -> None:
        self.end()
        if snapshot:
            self.channel.keep(x)
        if self.transport.trace is not None:
            named = {"fragment": self.part} if self.part else {}
            now = time.perf_counter()
            self.transport.trace.span("mix", "mix", start, now, round=self.round, **named)


class WaitingFlight(MpiFlight):
    """A flight that waits for every neighbour."""

    def __init__(self, channel: WaitingChannel, x: torch.Tensor, round: int) -> None:
        super().__init__(channel, x, round)
        self._requests = channel.requests(round)
        self.received = channel.received[: len(self.neighbours)]
        back = list(zip(self.received, channel.received_host, strict=False))
        self._job = StagedJob(channel, [Stage(self._requests)], [(channel.y_host, channel.y)], back)

    def done(self) -> bool:
        return self._job.done()

    def move(self) -> None:
        self._job.move()

    def _complete(self) -> float | Arrival:
        return self._job.wait(self.waits_for)

    def waits_for(self, over: bool) -> str:
        sets = (self._requests.receives, self._requests.sends)
        late = [
            j
            for k, j in enumerate(self.neighbours)
            if not all(self._through(requests, k) for requests in sets)
        ]
        return f"{self.transport.named(late)} in round {self.round}"

    def _through(self, requests: list[Any], k: int) -> bool:
        """All pieces of the message from, or to, the k-th neighbour."""
        per = len(requests) // len(self.neighbours)
        return all(request.Get_status() for request in requests[k * per : (k + 1) * per])
