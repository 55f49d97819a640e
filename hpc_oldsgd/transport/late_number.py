"""A number that a device computes, read by the host without a stall.

`.item()` waits for all that the stream has to do. Here the number is copied to the host when the
stream comes to it, and whoever reads it later waits for that copy alone.
"""

from __future__ import annotations

import torch

from .device import device_of


class LateNumber:
    def __init__(self, value: torch.Tensor) -> None:
        device, value = device_of(value.device), value.detach()
        self._event = None
        if device.is_host:
            self._number = value.item()  # now: its memory may hold another number later
            return
        self._memory = device.pinned(value.shape, value.dtype)
        self._event = device.event(blocking=True)
        device.copy(self._memory, value)
        self._event.record(device.current_stream())

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
            self._number, self._event = self._memory.item(), None
        return float(self._number)
