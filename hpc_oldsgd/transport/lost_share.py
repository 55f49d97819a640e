"""How much of a difference its message loses, and a warning where ever more is lost.

The lost share ||x - z - q|| / ||x - z|| is about 0.1 with 4 bits and 0.006 with 8. As long as it is
small nothing is amiss, however large the differences. Where it is large and what is lost grows on
and on, the rounding feeds itself. The share alone would not tell: it stays where it is, or falls,
while the models run away from each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .late_number import LateNumber

EVERY = 4  # messages of a stream: one is looked at
WINDOW = 4  # looks that are averaged
LARGE = 0.25  # share; no wonder if 4 bits meet differences of many magnitudes in a block
GROWTHS = 4  # windows in a row, each with so much more lost than the one before
GROWTH = 1.1
SAMPLE = 1 << 16  # numbers looked at
REMEDY = {4: "int8", 8: "bf16"}

Norms = tuple[LateNumber, LateNumber]


@dataclass
class Watch:
    """Of one stream."""

    messages: int = 0
    pending: Norms | None = None
    """Of the last look: on a device, and read at the next one, so that nobody waits for it."""
    looks: list[tuple[float, float]] = field(default_factory=list)
    """Of this window: norms of the differences and of what was lost."""
    lost: float = 0.0
    growths: int = 0

    def read(self) -> float:
        """The share, once what is lost has grown often enough; else 0."""
        if self.pending is not None:
            self.looks.append((self.pending[0].read(), self.pending[1].read()))
        if len(self.looks) < WINDOW:
            return 0.0
        before, lost = (sum(column) for column in zip(*self.looks, strict=True))
        share = lost / before if before else 0.0
        grown = share > LARGE and lost > GROWTH * self.lost > 0
        self.growths = self.growths + 1 if grown else 0
        self.lost, self.looks = lost, []
        return share if self.growths >= GROWTHS else 0.0


class LostShare:
    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.here = True
        """Whether this process looks and warns."""
        self._warned = False
        self._watches: dict[str, Watch] = {}

    @contextmanager
    def watching(self, stream: str, x: torch.Tensor, z: torch.Tensor, d: int) -> Iterator[None]:
        """Around what encodes x - z and adds it to z, up to d. Of all agents the first is seen."""
        if not (self.here and d) or self._warned:
            yield
            return
        watch = self._watches.setdefault(stream, Watch())
        watch.messages += 1
        if watch.messages % EVERY:
            yield
            return
        if share := watch.read():
            self._warn(share)
        if x.dim() > 1:
            x, z = x[0], z[0]
        some = slice(0, d, max(1, d // SAMPLE))
        known = z[some].clone()
        yield
        own = x[some].double()
        before, lost = (own - known).norm(), (own - z[some]).norm()
        watch.pending = LateNumber(before), LateNumber(lost)

    def _warn(self, share: float) -> None:
        self._warned = True
        warnings.warn(
            f"{self.bits} bits are too few for this run: {share:.0%} of each change is lost on the "
            f"wire int{self.bits}, and that grows from round to round: use {REMEDY[self.bits]}",
            stacklevel=2,
        )
