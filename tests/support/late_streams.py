"""Streams and events of late_device.py."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .late_device import LateDevice

ASKS_BEFORE_DONE = 2  # query() says no that often; then what it asks for runs


class Hold:
    def __init__(self, there: Callable[[], bool]) -> None:
        self.there = there

    def __call__(self) -> None:
        while not self.there():
            time.sleep(1e-3)


class LateStream:
    def __init__(self, device: LateDevice, name: str) -> None:
        self.device, self.name = device, name
        self.work: deque[Callable[[], None]] = deque()
        self.enqueued = self.done = 0
        self.running = False
        self.waited: dict[LateStream, int] = {}
        """How far other streams are when it does what is enqueued next."""
        if device.random is not None:
            device.start_thread(self)

    def enqueue(self, work: Callable[[], None]) -> None:
        with self.device.change:
            self.work.append(work)
            self.enqueued += 1
            self.device.change.notify_all()

    def wait_event(self, event: Any) -> None:
        if self.device.counts_wait("stream waits"):
            self.enqueue(event.reach)
            for stream, number in event.after.items():
                self.waited[stream] = max(number, self.waited.get(stream, 0))

    def synchronize(self) -> None:
        if self.device.counts_wait("stream synchronisations"):
            self.reach(self.enqueued)

    def reach(self, number: int) -> None:
        """Return when so many pieces are done; do them here if the stream has no thread."""
        if self.device.random is None:
            while self.step(number):
                pass
        with self.device.change:
            self.device.change.wait_for(lambda: self.done >= number)

    def hold_until(self, there: Callable[[], bool]) -> None:
        """Work that takes as long as `there` says no."""
        self.enqueue(Hold(there))

    def held(self, number: int) -> bool:
        """Whether it cannot come to `number` by now."""
        with self.device.change:
            ahead = list(self.work)[: max(0, number - self.done)]
        return any(isinstance(work, Hold) and not work.there() for work in ahead)

    def step(self, number: int) -> bool:
        """Do a piece of work, or wait until another thread has; False once `number` are done."""
        change = self.device.change
        with change:
            while self.running and self.done < number:
                change.wait()
            if self.done >= number or not self.work:
                return False
            self.running, work = True, self.work.popleft()
        try:
            with self.device.executing():
                work()
        finally:
            with change:
                self.running = False
                self.done += 1
                self.device.clock_ms += 1
                change.notify_all()
        return True


class LateEvent:
    """`elapsed_time` counts pieces of work of the whole device: each takes a millisecond."""

    def __init__(self, device: LateDevice, blocking: bool, timing: bool) -> None:
        self.device, self.blocking, self.timing = device, blocking, timing
        self._at: tuple[LateStream, int] | None = None
        self.after: dict[LateStream, int] = {}
        self._reached_ms = 0.0
        self._asked = 0

    def record(self, stream: LateStream) -> None:
        self._asked = 0
        stream.enqueue(self._note_time)
        self._at = stream, stream.enqueued
        self.after = {**stream.waited, stream: stream.enqueued}

    def _note_time(self) -> None:
        self._reached_ms = self.device.clock_ms

    @property
    def reached(self) -> bool:
        return self._at is None or self._at[0].done >= self._at[1]

    def query(self) -> bool:
        if not self.device.counts_wait("queries"):
            return True
        self._asked += 1
        lazy, at = self.device.random is None, self._at
        if lazy and self._asked > ASKS_BEFORE_DONE and at is not None and not at[0].held(at[1]):
            self.reach()
        return self.reached

    def synchronize(self) -> None:
        kind = "sleeping waits" if self.blocking else "spinning waits"
        if self.device.counts_wait("waits for nothing" if self.reached else kind):
            self.reach()

    def reach(self) -> None:
        if self._at is not None:
            self._at[0].reach(self._at[1])

    def elapsed_time(self, end: LateEvent) -> float:
        assert self.timing and end.timing and self.reached and end.reached
        return end._reached_ms - self._reached_ms
