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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from hpc_oldsgd.ops import checks
from hpc_oldsgd.transport.device import standing_in

from .late_dispatch import Enqueue, Memory, address, poison
from .late_streams import LateEvent, LateStream

PAUSE_S = 2e-3  # the longest pause between two pieces of work
Site = tuple[str, int]
"""A line of the source: the file's name in the package, and its number."""


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
        self.memories: dict[int, Memory] = {}
        self.freed_early: list[str] = []
        """Memory that was given back while another stream had work with it."""
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
            with Enqueue(self):
                yield
        finally:
            self._thread.dispatching = False

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Poison, of the shape of a tensor that may have no memory itself."""
        span = sum((n - 1) * k for n, k in zip(like.shape, like.stride(), strict=True))
        memory = Memory(self, (1 + span if like.numel() else 0) * like.element_size())
        self.memories[memory.address] = memory
        made = poison(memory.tensor(like, user=True))
        del memory.user
        return made

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the same memory, with a version counter of its own: a write was counted when enqueued.

        It does not keep the memory from being freed.
        """
        memory = self.memories.get(address(tensor))
        return tensor.data if memory is None else memory.tensor(tensor, user=False)

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
        for tensor in tensors:
            if (memory := self.memories.get(address(tensor))) is not None:
                memory.use(stream, stream.enqueued)
