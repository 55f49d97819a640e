"""Exchanges of differences over MPI (narrow.py): a channel's buffers hold messages of bytes.

The public copies belong to the streams, which use the channels in turn. A message that is whole
goes from z_i straight into the neighbours' copies of it, without a buffer between them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ... import ops
from ..base import LINE
from ..narrow import Stream
from ..staging import Arrival
from .exchange import Channel, MpiFlight, WaitingChannel, WaitingFlight
from .late_exchange import Edge, LateChannel, LateFlight

if TYPE_CHECKING:
    from . import MpiTransport

TAG_WHOLE = 10_000  # exchanges use the channel's number


def exchange(transport: MpiTransport, x: torch.Tensor, round: int, share: float) -> NarrowFlight:
    """x starts on its way: what it differs by from what the neighbours know, or whole."""
    stream = transport.open_stream(x, round)
    channel = stream.ahead or _channel(transport, x, stream)
    assert transport.streams is not None
    transport.streams.lost.here = transport.rank == 0  # one speaks for all
    if stream.ahead is None:
        stream.take(x, channel.next_y(), transport.streams.lost)
    # else the last mix has encoded x. Who has changed it since, against the contract of `settled`,
    # is heard of with the next message: the neighbours count on this one.
    stream.ahead = None
    flight: NarrowFlight
    if stream.known:
        flight = channel.fly(x, round, stream)
    else:
        flight = WholeFlight(channel, x, round, stream)
    flight.share = share
    return flight


def _channel(transport: MpiTransport, x: torch.Tensor, stream: Stream) -> NarrowChannel:
    kind = NarrowWaitingChannel if transport.late is None else NarrowLateChannel
    nbytes = stream.form.nbytes
    for channel in transport._channels:
        if isinstance(channel, kind) and channel.fits_message(x, nbytes):
            return channel
    made = kind(transport, x, len(transport._channels), nbytes)
    transport._channels.append(made)
    return made


class NarrowChannel(Channel):
    """Its y, and what it receives, are messages."""

    stream: Stream
    """Of the flight under way."""
    encoded: Stream | None = None
    """Whose message the last mix has left in y."""

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__(transport, x, number)

    def blank(self) -> torch.Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self._model[2])

    def fits_message(self, x: torch.Tensor, nbytes: int) -> bool:
        """Fragments of a model share the buffers, of which all is sent."""
        spare, most = self.nbytes - nbytes, 2 * LINE * x.element_size()
        free = not self.busy and self.encoded is None and self._model[2] == x.device
        return free and 0 <= spare < most

    def fly(self, x: torch.Tensor, round: int, stream: Stream) -> NarrowFlight:
        self.stream, self.encoded = stream, None
        flight = self._fly(x, round)
        assert isinstance(flight, NarrowFlight)
        return flight


class NarrowFlight(MpiFlight):
    """Mixes the public copies as they are with what this flight has brought."""

    channel: Channel
    stream: Stream

    def messages(self) -> list[tuple[int, torch.Tensor]]:
        """The neighbours that are mixed, and what came from each."""
        return list(zip(self.neighbours, self.received, strict=True))

    def mix_into(
        self,
        x: torch.Tensor,
        *,
        snapshot: bool = False,
        also: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        self.wait()
        start, stream, k = time.perf_counter(), self.stream, self.stream.form.body
        ahead = snapshot and also is None and self._may_encode()
        y, copies = self._copies()
        x_tail = self._mixed_tail(x, y, copies)
        y_next = self.channel.next_y() if ahead else None
        with self._watching(x, ahead):
            distance = self._mix_body(x, y, copies, y_next)
        if k < x.numel():
            tail = x[k:].clone() if x_tail is not None else x[k:]
            apart = ops.fused_mix_delta(
                tail, y[k:], [z[k:] for z in copies], self.weights, distance=distance is not None
            )
            distance = None if distance is None or apart is None else distance + apart
        if x_tail is not None:
            x[k:] = x_tail
        if also is not None:
            self._mix_also(*also, y, copies, 0 if x_tail is None else len(x_tail))
        if distance is not None:
            self.transport.add_distance(x, distance)
        self._mixed(x, False, start)
        if y_next is not None:
            stream.write_tail(x, y, y_next)
            stream.holds_x, stream.ahead = True, self.channel
            assert isinstance(self.channel, NarrowChannel)
            self.channel.encoded = stream

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
        self._apply()
        y, copies = self._copies()
        ops.fused_mix(out, y, copies, self.weights, acc, alpha, zero_acc=zero_acc)
        self._mixed(out, False, start)
        return out

    def drop(self) -> None:
        self._apply()
        self.end()

    def end(self) -> None:
        super().end()
        self.stream.end()

    def _may_encode(self) -> bool:
        """Whether the next message of this stream can be written now, by the pass that mixes."""
        return self.transport.topology.period == 1 and self.transport.settled()

    def _watching(self, x: torch.Tensor, ahead: bool) -> Any:
        assert self.transport.streams is not None and self.stream.z is not None
        lost = self.transport.streams.lost
        length = self.stream.form.body if ahead else 0
        return lost.watching(self.stream.name, x, self.stream.z, length)

    def _copies(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The own one, and those of the neighbours that are mixed; their statistics have come."""
        stream = self.stream
        assert stream.z is not None
        for j, message in self.messages():
            stream.read_tail(j, message)
        return stream.z, [stream.copies[j] for j, _ in self.messages()]

    def _mix_body(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        copies: list[torch.Tensor],
        y_next: torch.Tensor | None,
    ) -> torch.Tensor | None:
        form, k = self.stream.form, self.stream.form.body
        return ops.fused_mix_narrow(
            x[:k], y[:k], [z[:k] for z in copies],
            [form.differences(message) for _, message in self.messages()], self.weights, form.bits,
            next_message=None if y_next is None else form.differences(y_next),
            distance=self.transport.measure_distance,
        )  # fmt: skip

    def _apply(self) -> None:
        for j, message in self.messages():
            self.stream.apply(j, message)


class WholeChannel(WaitingChannel):
    """Memory of one flight: the public copies themselves."""

    def __init__(self, channel: Channel, x: torch.Tensor, stream: Stream, peers: list[int]) -> None:
        assert stream.z is not None
        self._z = stream.z
        super().__init__(channel.transport, x, TAG_WHOLE + channel.number)
        for j in peers:
            if j not in stream.copies:
                stream.copies[j] = torch.empty_like(self._z)
            self.received.append(stream.copies[j])
            self.received_host.append(self.host(stream.copies[j]))

    def blank(self) -> torch.Tensor:
        return self._z


class WholeFlight(NarrowFlight, WaitingFlight):
    """z_i travels whole, and everybody waits for it: at the start, and after a resume."""

    def __init__(self, channel: NarrowChannel, x: torch.Tensor, round: int, stream: Stream) -> None:
        transport, self.stream, self._reserved = channel.transport, stream, channel
        peers = [j for j, _ in transport.topology.neighbours(transport.rank, round)]
        self._whole = WholeChannel(channel, x, stream, peers)
        WaitingFlight.__init__(self, self._whole, x, round)
        self.lane, channel.busy = channel.number, True

    def end(self) -> None:
        super().end()
        self._whole.free()
        self._reserved.busy = False

    def _may_encode(self) -> bool:
        return False  # its channel has no buffer for a message

    def _copies(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert self.stream.z is not None
        return self.stream.z, self.received

    def _mix_body(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        copies: list[torch.Tensor],
        y_next: torch.Tensor | None,
    ) -> torch.Tensor | None:
        k, measure = self.stream.form.body, self.transport.measure_distance
        return ops.fused_mix_delta(
            x[:k], y[:k], [z[:k] for z in copies], self.weights, distance=measure
        )

    def _apply(self) -> None:
        """The copies have come as they are."""


class NarrowWaitingChannel(NarrowChannel, WaitingChannel):
    def _fly(self, x: torch.Tensor, round: int) -> NarrowWaitingFlight:
        return NarrowWaitingFlight(self, x, round)


class NarrowWaitingFlight(NarrowFlight, WaitingFlight):
    def __init__(self, channel: NarrowWaitingChannel, x: torch.Tensor, round: int) -> None:
        self.stream = channel.stream
        WaitingFlight.__init__(self, channel, x, round)


class NarrowEdge(Edge):
    """Keeps what comes late: the neighbour's copy must take every difference, in order."""

    def __init__(self, channel: NarrowLateChannel, j: int) -> None:
        super().__init__(channel, j)
        self._channel = channel
        self._expected: deque[Stream] = deque()
        """Whose messages are to come, from the last that came on."""
        self._taken = 0
        self.owed: list[tuple[Stream, torch.Tensor]] = []

    def begin(self) -> None:
        self._expected.append(self._channel.stream)
        super().begin()
        self.stream_of(self.end.snapshots)

    def stream_of(self, s: int) -> Stream:
        """Of the message of exchange s; those before it are no longer asked for."""
        while self._taken < s:
            self._expected.popleft()
            self._taken += 1
        return self._expected[0]

    def came_late(self) -> None:
        staging = self._channel.staging
        message = self.host.clone() if staging is None else staging.keep(self.host)
        self.owed.append((self.stream_of(self.end.snapshots - 1), message))


class NarrowLateChannel(NarrowChannel, LateChannel):
    edges: dict[int, NarrowEdge]  # type: ignore[assignment]

    def _fly(self, x: torch.Tensor, round: int) -> NarrowLateFlight:
        return NarrowLateFlight(self, x, round)

    def make_edge(self, j: int) -> NarrowEdge:
        return NarrowEdge(self, j)

    def catch_up(self) -> None:
        """The copies take what came late. Before they take what came in time."""
        for j, edge in self.edges.items():
            with self._lock:
                owed, edge.owed = edge.owed, []
            for stream, message in owed:
                if self.staging is not None:
                    message = self.staging.to_device(message)
                stream.apply(j, message)

    def drain(self) -> None:
        super().drain()
        self.catch_up()


class NarrowLateFlight(NarrowFlight, LateFlight):
    channel: NarrowLateChannel

    def __init__(self, channel: NarrowLateChannel, x: torch.Tensor, round: int) -> None:
        self.stream = channel.stream
        LateFlight.__init__(self, channel, x, round)

    def messages(self) -> list[tuple[int, torch.Tensor]]:
        return [(edge.j, edge.received) for edge in self.edges if edge.used]

    def _complete(self) -> float | Arrival:
        completed = super()._complete()
        self.channel.catch_up()
        return completed
