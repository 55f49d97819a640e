"""Exchanges over MPI that may leave out a late neighbour, on both sides of the edge.

Over an edge travel, in the order of its exchanges s = 0, 1, 2, ...: snapshots, and one answer of
each end for every s. Yes: the other's snapshot is here, sent the moment it arrives. No: the agent
gave up, sent at the end of its round. Both ends use exchange s if both answered yes. Who has
answered yes waits for the other's answer; who lacks the snapshot may answer no at any time. So both
ends always agree, and a snapshot that comes after a no is received and dropped.

Memory beyond an ordinary exchange: up to `staleness` more own snapshots, for neighbours that have
not taken them yet; on a time-varying graph also a receive buffer for every neighbour of the period.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI

from ..late import EdgeEnd
from ..progress import FIRST_SLEEP_S, Job, Stage
from ..staging import Arrival, Departure
from .exchange import Channel, MpiFlight
from .requests import as_bytes, pieces

if TYPE_CHECKING:
    from . import MpiTransport, WaitsFor

TAG_ANSWERS = 20_000
LOOK_S = 5e-4


class Snapshot:
    """An own y, MPI's until every neighbour it was sent to has it."""

    def __init__(self, channel: LateChannel) -> None:
        self._channel = channel
        self.y = channel.blank()
        self.host = channel.host(self.y)
        self._sends: dict[int, list[Any]] = {}
        self._active: list[Any] = []
        self.leaving = False
        """It is not sent yet: a device is still writing it."""
        self.posted_s = 0.0

    def send(self, j: int) -> None:
        t, tag = self._channel.transport, self._channel.number
        if j not in self._sends:
            parts = pieces(self.host, t.largest_message_bytes)
            self._sends[j] = [t.comm.Send_init(as_bytes(part), j, tag) for part in parts]
        MPI.Prequest.Startall(self._sends[j])
        self._active += self._sends[j]

    def out(self) -> bool:
        self._active = [request for request in self._active if not request.Test()]
        return not self._active and not self.leaving

    @property
    def made(self) -> int:
        return sum(map(len, self._sends.values()))

    def free(self) -> None:
        for requests in self._sends.values():
            for request in requests:
                request.Free()


class Edge:
    """One edge of one channel, from this end."""

    def __init__(self, channel: LateChannel, j: int) -> None:
        t = channel.transport
        self.j = j
        self.received = channel.blank()
        self.host = channel.host(self.received)
        parts = pieces(self.host, t.largest_message_bytes)
        self._snapshot_receives = [
            t.comm.Recv_init(as_bytes(part), j, channel.number) for part in parts
        ]
        self._comm, self._tag = t.comm, TAG_ANSWERS + channel.number
        self._answer = np.zeros(1, dtype=np.int64)
        self._answer_receive = t.comm.Recv_init(self._answer, j, self._tag)
        self._answer_sends: list[tuple[Any, Any]] = []  # requests, and the memory they read
        self._receives_snapshot = self._receives_answer = False
        self.end = EdgeEnd()
        self._cleared = 0
        self.decided_s = 0.0

    @property
    def used(self) -> bool | None:
        return self.end.used

    def begin(self) -> None:
        self.end.begin()

    def clear(self) -> None:
        """The device has read what the exchange before this one brought."""
        self._cleared += 1
        self._start_receives()

    def _start_receives(self) -> None:
        if not self._receives_snapshot and self.end.snapshots < self._cleared:
            MPI.Prequest.Startall(self._snapshot_receives)
            self._receives_snapshot = True
        if not self._receives_answer and self.end.awaits_answer:
            self._answer_receive.Start()
            self._receives_answer = True

    def advance(self) -> None:
        if self._receives_snapshot and MPI.Request.Testall(self._snapshot_receives):
            self._receives_snapshot = False
            answer = self.end.take_snapshot()
            if self.end.awaits_snapshot or self.used is False:
                self.came_late()
            self._send(answer)
        if self._receives_answer and self._answer_receive.Test():
            self._receives_answer = False
            heard, expected = int(self._answer[0]), self.end.answers
            if not self.end.take_answer(heard):
                raise RuntimeError(f"rank {self.j} speaks of exchange {heard // 2}, not {expected}")
        self._start_receives()
        self._answer_sends = [(r, memory) for r, memory in self._answer_sends if not r.Test()]

    def _send(self, answer: int | None) -> None:
        if answer is not None:
            memory = np.array([answer], dtype=np.int64)
            self._answer_sends.append((self._comm.Isend(memory, self.j, self._tag), memory))

    def decide(self, expired: bool, what: tuple[int, int], staleness: int) -> bool:
        """Whether it is decided if the edge is used in this round; may give up on it."""
        if self.used is None:
            self._send(self.end.decide(expired, what, staleness))
            if self.used is not None:
                self.decided_s = time.perf_counter()
                if not self.used and not self.end.awaits_snapshot:
                    self.came_late()
        return self.used is not None

    def came_late(self) -> None:
        """A snapshot is here that no mix will read: it is dropped."""

    @property
    def idle(self) -> bool:
        return not (self._receives_snapshot or self._receives_answer or self._answer_sends)

    @property
    def made(self) -> int:
        return len(self._snapshot_receives) + 1

    def free(self) -> None:
        for request in (*self._snapshot_receives, self._answer_receive):
            request.Free()


class LateChannel(Channel):
    """For flights that may leave out a neighbour, whose snapshot then arrives during the next."""

    native = (0, 0, 0)  # only the Python engine tests it

    def __init__(self, transport: MpiTransport, x: torch.Tensor, number: int) -> None:
        super().__init__(transport, x, number)
        self.edges: dict[int, Edge] = {}
        self.current = Snapshot(self)
        self.y = self.current.y
        self.snapshots = [self.current]
        self._lock = threading.Lock()  # the agent and the progress thread both advance
        self._job: Job | None = None
        self._in_engine = False
        self._departures: deque[tuple[Departure | None, Snapshot, list[int]]] = deque()
        assert transport.late is not None
        self._most = 1 + transport.late.staleness * transport.topology.period

    def next_y(self) -> torch.Tensor:
        """A snapshot's memory that every neighbour it was sent to has taken."""
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
        self.current, self.y = spare, spare.y
        return spare.y

    def _fly(self, x: torch.Tensor, round: int) -> LateFlight:
        return LateFlight(self, x, round)

    def depart(self, peers: list[int]) -> list[Edge]:
        """The current snapshot leaves for these neighbours, and theirs are awaited."""
        snapshot, departure = self.current, None
        if self.staging is not None:
            departure = self.staging.depart([(snapshot.host, snapshot.y)])
        with self._lock:
            for j in peers:
                if j not in self.edges:
                    self.edges[j] = self.make_edge(j)
                self.edges[j].begin()
            snapshot.leaving = True
            self._departures.append((departure, snapshot, peers))
            self._leave()
            idle, self._in_engine = not self._in_engine, True
        if idle:
            self._job = self.transport.late_engine.submit([Stage(self, start=False)])
        return [self.edges[j] for j in peers]

    def _leave(self) -> None:
        """Send what the device has written by now. Receives first."""
        while self._departures:
            departure, snapshot, peers = self._departures[0]
            if departure is not None:
                if not departure.copied.query():
                    return
                snapshot.posted_s = departure.posted()
            self._departures.popleft()
            for j in peers:
                self.edges[j].clear()
            for j in peers:
                snapshot.send(j)
            snapshot.leaving = False

    def make_edge(self, j: int) -> Edge:
        return Edge(self, j)

    def look_until(self, there: Callable[[], bool], waits_for: WaitsFor) -> None:
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
        self.look_until(self._advance, lambda over: self.transport.named(self._behind()))
        for edge in self.edges.values():
            edge.end.left_out.clear()

    def _behind(self) -> list[int]:
        return [j for j, edge in self.edges.items() if not edge.idle]

    def _advance(self) -> bool:
        """Whether all is sent, received and answered."""
        self._leave()
        for edge in self.edges.values():
            edge.advance()
        out = [snapshot.out() for snapshot in self.snapshots]
        return all(out) and not self._behind()

    def start(self) -> None:
        """`depart` has started it."""

    def test(self) -> bool:
        """For the progress engine."""
        with self._lock:
            self._in_engine = not self._advance()
            return not self._in_engine

    @property
    def made(self) -> int:
        return sum(part.made for part in self._parts())

    def free(self) -> None:
        for part in self._parts():
            part.free()

    def _parts(self) -> list[Edge | Snapshot]:
        return [*self.edges.values(), *self.snapshots]


class LateFlight(MpiFlight):
    """Decided when waited for: what is mixed then, and with which weights."""

    channel: LateChannel

    def __init__(self, channel: LateChannel, x: torch.Tensor, round: int) -> None:
        super().__init__(channel, x, round)
        self._fragment = int(x.storage_offset())
        self._snapshot = channel.current
        self.edges = channel.depart(self.neighbours)

    def done(self) -> bool:
        return all(edge.used is not None for edge in self.edges)

    def _complete(self) -> float | Arrival:
        late, staging = self.transport.late, self.channel.staging
        assert late is not None
        what = self.round % self.transport.topology.period, self._fragment
        computed = None if staging is None else staging.mark()
        give_up_s: float | None = None

        def decided() -> bool:
            nonlocal give_up_s
            now = time.perf_counter()
            # The agent waits from when its device has nothing left to do; the host is ahead of it.
            if give_up_s is None and (computed is None or computed.query()):
                give_up_s = now + late.wait
            expired = give_up_s is not None and now >= give_up_s
            each = [edge.decide(expired, what, late.staleness) for edge in self.edges]
            return all(each)

        self.channel.look_until(decided, self.waits_for)
        own, *others = self.weights
        weighted = list(zip(self.edges, others, strict=True))
        moved = sum(w for edge, w in weighted if not edge.used)
        self.weights = [own + moved, *(w for edge, w in weighted if edge.used)]
        used = [edge for edge in self.edges if edge.used]
        self.received = [edge.received for edge in used]
        self.left_out = len(self.edges) - len(used)
        through_s = max((edge.decided_s for edge in self.edges), default=self.posted)
        if staging is None:
            return through_s
        arrival = staging.come_back([(edge.received, edge.host) for edge in used], through_s)
        arrival.posted_s = self._snapshot.posted_s or self.posted  # it may have to leave yet
        staging.before_reading(arrival)
        return arrival

    def waits_for(self, over: bool) -> str:
        late = [edge.j for edge in self.edges if edge.used is None]
        return f"{self.transport.named(late)} in round {self.round}"
