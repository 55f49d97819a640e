"""Device memory on its way to and from MPI, without the training thread ever waiting for it.

`direct`: MPI reads and writes the tensors themselves (host memory, or a CUDA-aware MPI).
`host`: a side stream copies the snapshot to pinned host memory and what arrived back; a worker
thread waits for the copies and hands the messages to the engine. The code asks torch for
streams and events of the device at hand; the CPU has them too, so all of it runs there as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

WORKERS = 4  # as many flights may be open at once before one waits for another


def host_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """To and from which the device copies without anybody waiting."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class Staging:
    """Copies of one device's buffers in host memory, and the thread that keeps them in step."""

    def __init__(self, device: torch.device, copies: bool) -> None:
        self.device = device
        self.copies = copies
        self._api: Any = torch.get_device_module(device)
        self._side = self._api.Stream(device=device) if device.type != "cpu" else self._api.Stream()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="staging")

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory MPI uses in place of this tensor."""
        return host_memory(tensor.shape, tensor.dtype, self.device) if self.copies else tensor

    def mark(self) -> Any:
        """An event after all that the training thread has enqueued so far."""
        event = self._api.Event()
        event.record(self._api.current_stream(self.device))
        return event

    def fly(
        self,
        out: Sequence[tuple[torch.Tensor, torch.Tensor]],
        back: Sequence[tuple[torch.Tensor, torch.Tensor]],
        send: Callable[[], float],
    ) -> Future[tuple[float, Any]]:
        """Copy `out` (host, device), run `send`, copy `back` (device, host), all in a worker.

        The future holds when the message was through, and an event that the stream which reads
        the received tensors must wait for.
        """
        return self._workers.submit(self._fly, self.mark(), out, back, send)

    def _fly(
        self,
        written: Any,
        out: Sequence[tuple[torch.Tensor, torch.Tensor]],
        back: Sequence[tuple[torch.Tensor, torch.Tensor]],
        send: Callable[[], float],
    ) -> tuple[float, Any]:
        with self._api.stream(self._side):
            written.wait(self._side)
            self._copy(out)
            copied = self._api.Event()
            copied.record(self._side)
        copied.synchronize()  # this thread waits; the training thread computes
        send()
        with self._api.stream(self._side):
            self._copy(back)
            arrived = self._api.Event()
            arrived.record(self._side)
        return time.perf_counter(), arrived

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            if target is not source:  # MPI has the tensor itself
                target.copy_(source, non_blocking=True)

    def before_reading(self, arrived: Any) -> None:
        """The device's stream goes on once the arrived data is there; the host does not wait."""
        arrived.wait(self._api.current_stream(self.device))

    def stop(self) -> None:
        self._workers.shutdown(wait=True)
