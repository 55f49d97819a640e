"""Device memory on its way to and from MPI, without the training thread ever waiting for it.

`direct`: MPI reads and writes the tensors themselves (host memory, or a CUDA-aware MPI).
`host`: a side stream copies the snapshot to pinned host memory, and another one what arrived back.

The training thread only enqueues. Whoever sends then waits for `Departure.copied`: a worker thread
sleeps until it comes; without threads the event is asked now and then. Three waits keep the order:

    the side stream waits for the training stream       the snapshot is written
    MPI waits for `copied`                              the copy of it is complete
    the training stream waits for `arrived`             what came is back on the device

Each covers the way back too. `copied` of a round comes after all that the training stream has done
with what the round before brought, so MPI may then write into the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from .device import Device, Event

WORKERS = 4  # as many flights may be open at once before one waits for another
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(target, source)"""


@dataclass
class Departure:
    """A snapshot on its way to where MPI reads it."""

    begun: Event
    copied: Event
    device: Device

    def posted(self) -> float:
        """On the host's clock, when the snapshot was written; asked as soon as it is copied."""
        took_ms = 0.0 if self.device.is_host else self.begun.elapsed_time(self.copied)
        return time.perf_counter() - took_ms / 1e3


@dataclass
class Arrival:
    """Messages that are through, on their way back to the device."""

    through_s: float
    """On the host's clock, when MPI had them."""
    begun: Event
    arrived: Event
    posted_s: float = 0.0


class Staging:
    """Copies of one device's buffers in host memory, and the threads that keep them in step."""

    def __init__(self, device: Device, copies: bool) -> None:
        self.device = device
        self.copies = copies
        self._out, self._back = device.new_stream(), device.new_stream()
        # A thread starts on device 0, where its first call would open a second context.
        self._workers = ThreadPoolExecutor(
            WORKERS, thread_name_prefix="staging", initializer=device.make_current
        )

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory MPI uses in place of this tensor."""
        return self.device.pinned(tensor.shape, tensor.dtype) if self.copies else tensor

    def mark(self, timing: bool = False) -> Event:
        """An event after all that the training thread has enqueued so far."""
        event = self.device.event(timing=timing)
        event.record(self.device.current_stream())
        return event

    def depart(self, pairs: Pairs) -> Departure:
        """Copy (host, device) after all that is enqueued so far; nobody waits."""
        device = self.device
        self._out.wait_event(self.mark())
        begun, copied = device.event(timing=True), device.event(blocking=True, timing=True)
        with device.on(self._out):
            begun.record(self._out)
            self._copy(pairs)
            copied.record(self._out)
        return Departure(begun, copied, device)

    def come_back(self, pairs: Pairs, through_s: float) -> Arrival:
        """Copy (device, host): the messages are through, so the device has no use for the targets.

        Nobody waits.
        """
        device = self.device
        begun, arrived = device.event(timing=True), device.event(timing=True)
        with device.on(self._back):
            begun.record(self._back)
            self._copy(pairs)
            arrived.record(self._back)
        return Arrival(through_s, begun, arrived)

    def fly(self, out: Pairs, back: Pairs, send: Callable[[], float]) -> Future[Arrival]:
        """Copy `out`, run `send` in a worker, which returns when all was through; copy `back`."""
        departure = self.depart(out)

        def carry() -> Arrival:
            departure.copied.synchronize()  # this thread sleeps; the training thread computes
            posted_s = departure.posted()
            arrival = self.come_back(back, send())
            arrival.posted_s = posted_s
            return arrival

        return self._workers.submit(carry)

    def before_reading(self, arrival: Arrival) -> None:
        """The device's stream goes on once the arrived data is there; the host does not wait."""
        self.device.current_stream().wait_event(arrival.arrived)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """What MPI has just written, in host memory; complete when this returns."""
        kept = self.device.pinned(tensor.shape, tensor.dtype)
        if self.copies:
            kept.copy_(tensor)  # from host to host
            return kept
        done = self.device.event(blocking=True)
        with self.device.on(self._back):
            self.device.copy(kept, tensor)
            done.record(self._back)
        done.synchronize()
        return kept

    def to_device(self, kept: torch.Tensor) -> torch.Tensor:
        """For what the training thread enqueues next."""
        made = torch.empty(kept.shape, dtype=kept.dtype, device=self.device.torch)
        self.device.copy(made, kept)
        return made

    def _copy(self, pairs: Pairs) -> None:
        for target, source in pairs:
            if target is not source:  # MPI has the tensor itself
                self.device.copy(target, source)

    def stop(self) -> None:
        self._workers.shutdown(wait=True)
