"""Batch losses, read when a device has computed them long ago.

Reading a loss at once would make the host wait for the device at every step. So those of a round
are read at the end of the next one. On the CPU they are read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ..transport.device import device_of
from ..transport.late_number import LateNumber


class Losses:
    def __init__(self, device: torch.device, read: Callable[[int, float], None]) -> None:
        """`read` gets them in order: the worker's number and the loss."""
        self.late = 0 if device_of(device).is_host else 1
        """Boundaries from the end of their round to when they are read."""
        self._read = read
        self._noted: deque[tuple[int, LateNumber]] = deque()
        self._of_earlier_rounds = 0

    def note(self, j: int, loss: LateNumber | float) -> None:
        if isinstance(loss, LateNumber) and self.late:
            self._noted.append((j, loss))
        else:
            self._read(j, loss.read() if isinstance(loss, LateNumber) else loss)

    def boundary(self, read_all: bool = False) -> None:
        """Read those of earlier rounds than the one that ends here, or all."""
        self._take(len(self._noted) if read_all else self._of_earlier_rounds)
        self._of_earlier_rounds = len(self._noted)

    def read_all(self) -> None:
        """Before something needs them: a row of metrics, a checkpoint, the end."""
        self.boundary(read_all=True)

    def drop(self) -> None:
        self._noted.clear()
        self._of_earlier_rounds = 0

    def _take(self, count: int) -> None:
        for _ in range(count):
            j, loss = self._noted.popleft()
            self._read(j, loss.read())
