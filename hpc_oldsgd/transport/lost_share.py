"""How much of a difference its message loses, and a warning where that keeps growing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class LostShare:
    def __init__(self, bits: int) -> None:
        self.bits = bits

    @contextmanager
    def watching(self, x: torch.Tensor, z: torch.Tensor, d: int) -> Iterator[None]:
        yield
