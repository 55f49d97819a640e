"""What moves MPI's messages while the agent computes.

MPI moves a large message only during calls to it. `thread` tests the open requests from a thread
of its own, about once a millisecond (native code where it is built). `poll` tests from inside the
backward pass, for an MPI without MPI_THREAD_MULTIPLE. `none` tests only when the agent waits. In
each case a job is a list of stages: start, test until done, add.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..ops import native
from .device import Device

PERIOD_S = 1e-3  # 0.2 ms fights the gradient for the core, 5 ms leaves the network idle
FIRST_SLEEP_S = 50e-6
WAITED_FOR_SLEEP_S = 200e-6
WAITED_FOR_GROWTH = 1.05  # each later pause is 5% longer: a long wait costs no core


class Requests(Protocol):
    """A fixed set of requests that can be started and tested together."""

    native: tuple[Any, int, int]  # address holder, receives, count

    def start(self) -> None: ...

    def test(self) -> bool: ...


@dataclass
class Stage:
    requests: Requests
    start: bool = True
    add: tuple[torch.Tensor, torch.Tensor] | None = None  # dst += src once they are done


class Job(Protocol):
    done: bool
    done_s: float
    error: int


class Engine(Protocol):
    threaded: bool

    def work_with(self, device: Device) -> None:
        """From now on the messages may lie in this device's memory.

        An MPI with CUDA needs a device in every thread that calls it ("invalid device context").
        """

    def submit(self, stages: Sequence[Stage]) -> Job: ...

    def wait(self, job: Job, timeout_s: float) -> bool: ...

    def poll(self) -> None: ...

    def stop(self) -> None: ...


def next_pause(pause: float, waited_for: bool, period_s: float) -> float:
    growth = WAITED_FOR_GROWTH if waited_for and pause >= WAITED_FOR_SLEEP_S else 2.0
    return min(growth * pause, period_s)


class PythonJob:
    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self.started = False
        self.done = False
        self.done_s = 0.0
        self.error = 0
        self.exception: BaseException | None = None

    def advance(self) -> bool:
        """Go as far as possible without waiting; True if a stage was finished."""
        moved = False
        while self.stages:
            stage = self.stages[0]
            if not self.started:
                self.started = True
                if stage.start:
                    stage.requests.start()
            if not stage.requests.test():
                return moved
            if stage.add is not None:
                stage.add[0].add_(stage.add[1])
            self.stages.pop(0)
            self.started = False
            moved = True
        return moved


class PythonEngine:
    """The same engine as csrc/progress.cpp, for an installation without the extension."""

    def __init__(self, threaded: bool, period_s: float = PERIOD_S) -> None:
        self.threaded = threaded
        self._period_s = period_s
        self._open: list[PythonJob] = []
        self._change = threading.Condition()
        self._waiters = 0
        self._stopping = False
        self._device: Device | None = None
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)
            self._thread.start()

    def work_with(self, device: Device) -> None:
        with self._change:
            self._device = device

    def submit(self, stages: Sequence[Stage]) -> PythonJob:
        job = PythonJob(stages)
        with self._change:
            self._open.append(job)
            self._change.notify_all()
        if not self.threaded:
            self._pass()
        return job

    def wait(self, job: Job, timeout_s: float) -> bool:
        assert isinstance(job, PythonJob)
        until, pause = time.perf_counter() + timeout_s, FIRST_SLEEP_S
        if self.threaded:
            with self._change:
                self._waiters += 1
                self._change.wait_for(lambda: job.done, timeout_s)
                self._waiters -= 1
        else:
            while not job.done and time.perf_counter() < until:
                if not self._pass():
                    time.sleep(pause)
                    pause = next_pause(pause, True, self._period_s)
        if job.exception is not None:
            raise job.exception
        return job.done

    def poll(self) -> None:
        if not self.threaded:
            self._pass()

    def stop(self) -> None:
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _pass(self) -> bool:
        with self._change:
            jobs = list(self._open)
        moved = False
        for job in jobs:
            try:
                moved |= job.advance()
                if job.stages:
                    continue
            except Exception as error:  # raised in `wait`
                job.exception = error
            with self._change:
                job.done_s = time.perf_counter()
                job.done = True
                self._open.remove(job)
                self._change.notify_all()
        return moved

    def _loop(self) -> None:
        pause, known, waited_for = FIRST_SLEEP_S, 0, False
        device: Device | None = None
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopping or self._open)
                if self._stopping:
                    return
                if self._device is not None and self._device is not device:
                    device = self._device
                    device.make_current()
                if len(self._open) != known:
                    pause = FIRST_SLEEP_S
            moved = self._pass()
            known = len(self._open)
            if moved:
                pause = FIRST_SLEEP_S
                continue
            if self._waiters and not waited_for:
                pause = min(pause, WAITED_FOR_SLEEP_S / 2)
            waited_for = self._waiters > 0
            pause = next_pause(pause, waited_for, self._period_s)
            time.sleep(pause)


class NativeEngine:
    """csrc/progress.cpp: needs no GIL, so it does not delay a model of many small ops."""

    def __init__(self, functions: dict[str, int], sizes: tuple[int, int], threaded: bool) -> None:
        self.threaded = threaded
        self._engine = native.extension.Engine(
            functions["MPI_Startall"], functions["MPI_Testall"], *sizes, PERIOD_S, threaded
        )

    def work_with(self, device: Device) -> None:
        context = device.native_context()
        if context is not None:
            self._engine.enter(*context)

    def submit(self, stages: Sequence[Stage]) -> Job:
        steps = []
        for stage in stages:
            step = native.extension.Stage(*stage.requests.native, stage.start)
            if stage.add is not None:
                dst, src = stage.add
                dtype = native.DTYPES[dst.dtype]
                step.then_add(dst.data_ptr(), src.data_ptr(), dst.numel(), dtype)
            steps.append(step)
        job: Job = self._engine.submit(steps)
        return job

    def wait(self, job: Job, timeout_s: float) -> bool:
        return bool(self._engine.wait(job, timeout_s))

    def poll(self) -> None:
        self._engine.poll()

    def stop(self) -> None:
        self._engine.stop()
