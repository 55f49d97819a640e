"""Exchanges over MPI that may leave out a late neighbour, on both sides of the edge.

Over an edge travel, in the order of its exchanges s = 0, 1, 2, ...: snapshots, and of each end one
word on every s. Yes: the other's snapshot is here, said the moment it arrives. No: the agent gave
up, said at the end of its round. Both ends use exchange s if both said yes. Who has said yes waits
for the other's word; who lacks the snapshot may say no at any time. So both ends always agree, and
a snapshot that comes after a no is received and dropped.

Memory beyond an ordinary exchange: up to `staleness` more own snapshots, for neighbours that have
not taken them yet; on a time-varying graph also a receive buffer for every neighbour of the period.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI

from ..progress import FIRST_SLEEP_S, Job, Stage
from .exchange import Channel, InFlight, MpiFlight
from .requests import as_bytes, pieces

if TYPE_CHECKING:
    from . import MpiTransport

TAG_WORDS = 20_000
LOOK_S = 5e-4


class Snapshot:
    """An own y, MPI's until every neighbour it was sent to has it."""

    def __init__(self, channel: LateChannel) -> None:
        self._channel = channel
        self.y = channel.blank()
        self.host = channel.staging.host(self.y) if channel.staging else self.y
        self._sends: dict[int, list[Any]] = {}
        self._active: list[Any] = []

    def send(self, j: int) -> None:
        t, tag = self._channel.transport, self._channel.tag
        if j not in self._sends:
            parts = pieces(self.host, t.largest_message_bytes)
            self._sends[j] = [t.comm.Send_init(as_bytes(part), j, tag) for part in parts]
        MPI.Prequest.Startall(self._sends[j])
        self._active += self._sends[j]

    def out(self) -> bool:
        self._active = [request for request in self._active if not request.Test()]
        return not self._active

    @property
    def made(self) -> int:
        return sum(map(len, self._sends.values()))

    def free(self) -> None:
        for requests in self._sends.values():
            for request in requests:
                request.Free()


class Line:
    """One edge of one channel, from this end."""

    def __init__(self, channel: LateChannel, j: int) -> None:
        t = channel.transport
        self.j = j
        self.received = channel.blank()
        self.host = channel.staging.host(self.received) if channel.staging else self.received
        parts = pieces(self.host, t.largest_message_bytes)
        self._data = [t.comm.Recv_init(as_bytes(part), j, channel.tag) for part in parts]
        self._comm, self._tag = t.comm, TAG_WORDS + channel.tag
        self._heard = np.zeros(1, dtype=np.int64)
        self._ear = t.comm.Recv_init(self._heard, j, self._tag)
        self._mouth: list[tuple[Any, Any]] = []  # words on their way, and their memory
        self._receiving = self._listening = False
        self.left_out: dict[int, int] = {}
        """phase -> how many of its rounds in a row the edge was left out; the same at both ends."""
        self.s = -1  # the exchange under way
        self.arrived = self.said = self.heard = 0  # how many so far
        self.yes = self.theirs = False  # the last words
        self.used: bool | None = None
        self.settled_s = 0.0

    def begin(self) -> None:
        self.s += 1
        self.used = None
        self._go_on()

    def _go_on(self) -> None:
        if not self._receiving and self.arrived <= self.s:
            MPI.Prequest.Startall(self._data)
            self._receiving = True
        if not self._listening and self.heard <= self.s:
            self._ear.Start()
            self._listening = True

    def advance(self) -> None:
        if self._receiving and MPI.Request.Testall(self._data):
            self._receiving = False
            self.arrived += 1
            if self.arrived == self.s + 1 and self.said == self.s:
                self._say(True)
        if self._listening and self._ear.Test():
            self._listening = False
            about, self.theirs = int(self._heard[0]) // 2, bool(self._heard[0] % 2)
            if about != self.heard:
                raise RuntimeError(f"rank {self.j} speaks of exchange {about}, not {self.heard}")
            self.heard += 1
        self._go_on()
        self._mouth = [(word, memory) for word, memory in self._mouth if not word.Test()]

    def _say(self, yes: bool) -> None:
        word = np.array([2 * self.s + yes], dtype=np.int64)
        self._mouth.append((self._comm.Isend(word, self.j, self._tag), word))
        self.said += 1
        self.yes = yes

    def settle(self, expired: bool, phase: int, staleness: int) -> bool:
        """Whether it is decided if the edge is used in this round."""
        if self.used is not None:
            return True
        said = self.said > self.s
        refused = self.heard > self.s and not self.theirs
        must = self.left_out.get(phase, 0) >= staleness
        if not said and (refused or (expired and not must)):
            self._say(False)
            self.used = False
        elif said and refused:
            self.used = False
        elif said and self.heard > self.s:
            self.used = True
        if self.used is None:
            return False
        self.settled_s = time.perf_counter()
        self.left_out[phase] = 0 if self.used else self.left_out.get(phase, 0) + 1
        return True

    @property
    def idle(self) -> bool:
        return not (self._receiving or self._listening or self._mouth)

    @property
    def made(self) -> int:
        return len(self._data) + 1

    def free(self) -> None:
        for request in (*self._data, self._ear):
            request.Free()


class LateChannel(Channel):
    """The edges of one flight at a time; late snapshots still arrive while the next ones leave."""

    native = (0, 0, 0)  # only the Python engine tests it

    def __init__(self, transport: MpiTransport, x: torch.Tensor, tag: int) -> None:
        self.transport, self.tag = transport, tag
        self.busy = False
        self.fresh = None
        self._model = (x.shape, x.dtype, x.device)
        self._wire = transport.wire or x.dtype
        self.staging = transport.staging_for(x.device)
        self.lines: dict[int, Line] = {}
        self.current = Snapshot(self)
        self.snapshots = [self.current]
        self._lock = threading.Lock()  # the agent and the progress thread both advance
        self._job: Job | None = None
        self._pumping = False
        assert transport.late is not None
        self._most = 1 + transport.late.staleness * transport.topology.period

    def blank(self) -> torch.Tensor:
        shape, _, device = self._model
        return torch.empty(shape, dtype=self._wire, device=device)

    @property
    def y(self) -> torch.Tensor:  # type: ignore[override]
        return self.current.y

    def next_y(self) -> torch.Tensor:
        """Memory for the next snapshot: one that everybody has taken."""
        with self._lock:
            spare = next((s for s in (self.current, *self.snapshots) if s.out()), None)
        if spare is None and len(self.snapshots) < self._most:
            spare = Snapshot(self)
            self.snapshots.append(spare)
        if spare is None:  # the oldest one was taken, and MPI is about to say so
            self.look_until(
                lambda: any(s.out() for s in self.snapshots), lambda over: "a send to end"
            )
            return self.next_y()
        self.current = spare
        return spare.y

    def depart(self, peers: list[int]) -> list[Line]:
        """The current snapshot leaves for these neighbours, and theirs are awaited."""
        if self.staging is not None:
            self.staging.fly([(self.current.host, self.current.y)], [], float).result()
        with self._lock:
            for j in peers:
                if j not in self.lines:
                    self.lines[j] = Line(self, j)
                self.lines[j].begin()
            for j in peers:
                self.current.send(j)
            asleep, self._pumping = not self._pumping, True
        if asleep:
            self._job = self.transport.late_engine.submit([Stage(self, start=False)])
        return [self.lines[j] for j in peers]

    def look_until(self, there: Callable[[], bool], waits_for: Callable[[bool], str]) -> None:
        """Advance from the agent's own thread until something is there, whatever the progress."""

        def look(seconds: float) -> bool:
            pause, until = FIRST_SLEEP_S, time.perf_counter() + seconds
            while True:
                failed = getattr(self._job, "exception", None)
                if failed is not None:
                    raise failed
                with self._lock:
                    self._advance()
                    if there():
                        return True
                if time.perf_counter() >= until:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, LOOK_S)

        self.transport.await_done(look, waits_for)

    def drain(self) -> None:
        """Receive and drop all that is late; counts start anew. Collective."""
        self.look_until(self._advance, lambda over: self.transport.named(list(self._behind())))
        for line in self.lines.values():
            line.left_out.clear()

    def _behind(self) -> list[int]:
        return [j for j, line in self.lines.items() if not line.idle]

    def _advance(self) -> bool:
        for line in self.lines.values():
            line.advance()
        out = [snapshot.out() for snapshot in self.snapshots]
        return all(out) and not self._behind()

    def start(self) -> None:
        raise AssertionError("started by `depart`")

    def test(self) -> bool:
        """For the progress engine: True once all is sent, received and said."""
        with self._lock:
            self._pumping = not self._advance()
            return not self._pumping

    @property
    def made(self) -> int:
        return sum(piece.made for piece in self._pieces())

    def free(self) -> None:
        for piece in self._pieces():
            piece.free()

    def _pieces(self) -> list[Line | Snapshot]:
        return [*self.lines.values(), *self.snapshots]


class LateFlight(MpiFlight):
    """Decided when waited for: what is mixed then, and with which weights."""

    channel: LateChannel

    def __init__(self, transport: MpiTransport, channel: LateChannel, round: int) -> None:
        InFlight.__init__(self, transport, round, lane=channel.tag)
        self.channel = channel
        channel.busy = True
        neighbours = transport.topology.neighbours(transport.rank, round)
        self.neighbours = [j for j, _ in neighbours]
        self._own = transport.topology.self_weight(transport.rank, round)
        self._w = [w for _, w in neighbours]
        self._lines = channel.depart(self.neighbours)

    def wait(self) -> None:
        if self.waited:
            return
        late, phase = self.transport.late, self.round % self.transport.topology.period
        assert late is not None
        start = time.perf_counter()
        give_up_s = start + late.wait

        def settled() -> bool:
            expired = time.perf_counter() >= give_up_s
            decided = [line.settle(expired, phase, late.staleness) for line in self._lines]
            return all(decided)

        self.channel.look_until(settled, self.waits_for)
        self.waited = True
        used = [line for line in self._lines if line.used]
        self.received = [line.received for line in used]
        both = list(zip(self._lines, self._w, strict=True))
        moved = sum(w for line, w in both if not line.used)
        self.weights = [self._own + moved, *(w for line, w in both if line.used)]
        staging = self.channel.staging
        if staging is not None:
            back = [(line.received, line.host) for line in used]
            staging.before_reading(staging.fly(back, [], float).result()[1])
        completed = max((line.settled_s for line in self._lines), default=self.posted)
        self._record(start, completed, left_out=len(both) - len(used))

    def waits_for(self, over: bool) -> str:
        late = [line.j for line in self._lines if line.used is None]
        return f"{self.transport.named(late)} in round {self.round}"
