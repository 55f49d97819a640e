"""A device for tests: streams that run their work later, and memory that shows early reads.

Tensors are those of the CPU. Inside `with LateDevice() as device:` each torch operation of this
thread, the mixing op included, is only enqueued on the thread's stream, as on a GPU. New memory is
poison (NaN, or 0x7f) until something has written it.

Two ways to run the work (`LateDevice(seed=...)` chooses the second):

- As late as possible, without any thread: a stream moves only when somebody waits for it, and then
  no further than it must. Who forgets to wait reads poison or the last round's data, every time.
- A thread for each stream, with random pauses. For stress; a missing wait is found by luck.

It counts what a GPU would do: launches on each stream, copies each way, waits of each thread. And
it can ignore the waits of one line of the source (`ignore`), which is how the tests see that every
wait is needed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from hpc_oldsgd.ops import checks
from hpc_oldsgd.transport.device import standing_in

ASKS_BEFORE_DONE = 2  # query() says no that often; then what it asks for runs
PAUSE_S = 2e-3  # the longest pause between two pieces of work
READS_TO_HOST = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
Site = tuple[str, int]
"""A line of the source: the file's name in the package, and its number."""


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
        self._reached_ms = 0.0
        self._asked = 0

    def record(self, stream: LateStream) -> None:
        self._asked = 0
        stream.enqueue(self._note_time)
        self._at = stream, stream.enqueued

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


class LateDevice:
    torch = torch.device("cpu")
    is_host = False

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.change = threading.Condition()
        self.clock_ms = 0.0
        self.counts: Counter[str] = Counter()
        """What was asked of the device: see `launched`, `copied` and `waits`."""
        self.launches: Counter[tuple[str, str]] = Counter()
        """(stream, operation) -> how often."""
        self.sites: set[Site] = set()
        """Lines of the package that waited."""
        self.ignore: Site | None = None
        """Waits of this line do nothing."""
        self.in_capture = False
        self.current_in: set[str] = set()
        """Names of the threads that have made this device theirs."""
        self._host: set[int] = set()
        self._memory: list[torch.Tensor] = []  # pinned: an address is not used twice
        self._thread = threading.local()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._streams = 0
        self.training = self.new_stream("training")

    # -- the calls of hpc_oldsgd.transport.device.Device --------------------------------------

    def make_current(self) -> None:
        self.current_in.add(threading.current_thread().name)

    def native_context(self) -> None:
        return None

    def new_stream(self, name: str = "") -> LateStream:
        self._streams += 1
        return LateStream(self, name or f"side {self._streams - 1}")

    def current_stream(self) -> LateStream:
        stream: LateStream = getattr(self._thread, "stream", self.training)
        return stream

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before = self.current_stream()
        self._thread.stream = stream
        try:
            with self._dispatching():
                yield
        finally:
            self._thread.stream = before

    def event(self, *, blocking: bool = False, timing: bool = False) -> LateEvent:
        return LateEvent(self, blocking, timing)

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with self.executing():
            memory = poison(torch.empty(shape, dtype=dtype))
        self._host.add(address(memory))
        self._memory.append(memory)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._dispatching():
            target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        if self.counts_wait("device synchronisations"):
            self.training.reach(self.training.enqueued)

    def capturing(self) -> bool:
        return self.in_capture

    # -- for tests ----------------------------------------------------------------------------

    def __enter__(self) -> LateDevice:
        self._open = ExitStack()
        self._open.enter_context(standing_in(self))
        self._open.enter_context(self._dispatching())
        # So the mixing op comes to torch's dispatcher, where it is enqueued like any other.
        traced = checks.traced
        checks.traced = lambda *tensors: not self.busy  # type: ignore[assignment]
        self._open.callback(setattr, checks, "traced", traced)
        return self

    def __exit__(self, *error: Any) -> None:
        self.training.reach(self.training.enqueued)
        self._open.close()
        with self.change:
            self._stopping = True
            self.change.notify_all()
        for thread in self._threads:
            thread.join()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor as it is when all work of the training stream is done."""
        self.training.reach(self.training.enqueued)
        with self.executing():
            return tensor.detach().clone()

    def reset_counts(self) -> None:
        self.counts.clear()
        self.launches.clear()

    @property
    def busy(self) -> bool:
        """This thread runs what was enqueued."""
        return bool(getattr(self._thread, "executing", 0))

    @contextmanager
    def executing(self) -> Iterator[None]:
        depth = getattr(self._thread, "executing", 0)
        self._thread.executing = depth + 1
        try:
            with torch.no_grad():
                yield
        finally:
            self._thread.executing = depth

    def counts_wait(self, kind: str) -> bool:
        """Whether the wait happens, or is the one that is ignored."""
        frame = sys._getframe(2)
        while "/contextlib.py" in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        site = Path(frame.f_code.co_filename).name, frame.f_lineno
        self.sites.add(site)
        if site == self.ignore:
            return False
        by = "training" if threading.current_thread() is threading.main_thread() else "worker"
        self.counts[f"{kind}, {by} thread"] += 1
        return True

    # -- inside --------------------------------------------------------------------------------

    def start_thread(self, stream: LateStream) -> None:
        assert self.random is not None
        pauses = random.Random(self.random.random())

        def run() -> None:
            while True:
                with self.change:
                    self.change.wait_for(lambda: self._stopping or stream.work)
                    if self._stopping and not stream.work:
                        return
                time.sleep(pauses.random() * PAUSE_S)
                stream.step(stream.done + 1)

        self._threads.append(threading.Thread(target=run, name=f"stream {stream.name}"))
        self._threads[-1].start()

    @contextmanager
    def _dispatching(self) -> Iterator[None]:
        if getattr(self._thread, "dispatching", False):
            yield
            return
        self._thread.dispatching = True
        try:
            with _Enqueue(self):
                yield
        finally:
            self._thread.dispatching = False

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return address(tensor) in self._host

    def enqueue(self, name: str, tensors: list[torch.Tensor], work: Callable[[], Any]) -> None:
        """A kernel, or a copy if pinned memory takes part."""
        pinned = [self.is_pinned(t) for t in tensors]
        stream = self.current_stream()
        if any(pinned):
            assert name == "copy_", f"{name} on pinned and on device memory"
            self.counts["copies to the host" if pinned[0] else "copies to the device"] += 1
        else:
            self.counts["launches"] += 1
            self.launches[stream.name, name] += 1
        stream.enqueue(work)


class _Enqueue(TorchDispatchMode):
    """One thread's torch operations go to its stream."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        device, kwargs = self.device, kwargs or {}
        if device.busy:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        returns = [r.alias_info for r in func._schema.returns]
        written = [a.alias_info for a in func._schema.arguments]
        writes = any(info is not None and info.is_write for info in written)
        with device.executing():
            if not writes and any(info is not None for info in returns):
                return func(*args, **kwargs)  # a view
            if tensors and all(map(device.is_pinned, tensors)):
                return func(*args, **kwargs)  # the host's own work
            if name in READS_TO_HOST:
                device.counts["training synchronised by a read"] += 1
                stream = device.current_stream()
                stream.reach(stream.enqueued)
                return func(*args, **kwargs)
            if not tensors or name.startswith(("empty", "new_empty")):
                made = func(*args, **kwargs)
                return poison(made) if "empty" in name else made
            # Aliases with version counters of their own: the write was counted when enqueued.
            now, named = tree_map_only(torch.Tensor, lambda t: t.data, (args, kwargs))
            if writes:
                device.enqueue(name, tensors, lambda: func(*now, **named))
                given = (*args, *kwargs.values())
                return given[0] if returns else None
            return self._later(name, func, tensors, now, named)

    def _later(self, name: str, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        """Its results are memory that is poison until it has run."""
        shapes = func(*tree_map_only(torch.Tensor, _meta, args), **_on_meta(kwargs))
        made = tree_map_only(torch.Tensor, _like, shapes)

        def run() -> None:
            results = [t for t in tree_iter(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            targets = [t for t in tree_iter(aliases) if isinstance(t, torch.Tensor)]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        aliases = tree_map_only(torch.Tensor, lambda t: t.data, made)
        self.device.enqueue(name, tensors, run)
        return made


def _meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    moved = tree_map_only(torch.Tensor, _meta, kwargs)
    return {**moved, "device": torch.device("meta")} if "device" in moved else moved


def _like(t: torch.Tensor) -> torch.Tensor:
    return poison(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))


def poison(t: torch.Tensor) -> torch.Tensor:
    if t.dtype is torch.bool:
        return t
    return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(0x7F)


def address(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()
