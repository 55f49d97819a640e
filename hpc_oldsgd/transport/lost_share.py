"""How much of a difference its message loses, and a warning where ever more is lost.

The lost share ||x - z - q|| / ||x - z|| is about 0.1 with 4 bits and 0.006 with 8. Where it is
large and what is lost grows, the rounding feeds itself. The share alone would not tell: it stays
where it is, or falls, while the models run away from each other.

At the border of stability even a share of 0.1 feeds itself, slowly. That is told from differences
that grow for another reason by its length: a step size that is warmed up makes them grow by ever
smaller factors, an instability by the same factor again and again. If the factor is large, that is
seen soon.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .late_number import LateNumber

EVERY = 4  # messages of a stream: one is looked at
WINDOW = 4  # looks that are averaged
LARGE = 0.25  # share; no wonder if 4 bits meet differences of many magnitudes in a block
GROWTHS = 4  # windows in a row, each with so much more lost than the one before
GROWTH = 1.1
SOME = 0.02  # share; with 8 bits it is less, and a run that grows would grow with fp32 too
STEEPS = 5  # windows in a row, each with more lost by a larger factor
STEEP = 1.55  # what grows as k^2 from 0 does so by 7, 2.7, 1.9, 1.7, 1.5
SPAN = 4  # windows
LONG_GROWTHS = 4  # spans in a row; what grows linearly from 0 does so by 3, 5/3, 7/5, 9/7
LONG_GROWTH = 1.4
SAMPLE = 1 << 16  # numbers looked at
REMEDY = {4: "int8", 8: "bf16"}

Norms = tuple[LateNumber, LateNumber]


@dataclass
class Growth:
    """How often in a row a number was larger than the last one by a factor."""

    factor: float
    last: float = 0.0
    times: int = 0

    def add(self, value: float, counts: bool) -> None:
        grown = counts and value > self.factor * self.last > 0
        self.times = self.times + 1 if grown else 0
        self.last = value


@dataclass
class Watch:
    """Of one stream."""

    messages: int = 0
    pending: Norms | None = None
    """Of the last look: on a device, and read at the next one, so that nobody waits for it."""
    looks: list[tuple[float, float]] = field(default_factory=list)
    """Of this window: norms of the differences and of what was lost."""
    windows: list[float] = field(default_factory=list)
    """Of this span: what was lost."""
    fast: Growth = field(default_factory=lambda: Growth(GROWTH))
    steep: Growth = field(default_factory=lambda: Growth(STEEP))
    slow: Growth = field(default_factory=lambda: Growth(LONG_GROWTH))

    def read(self) -> float:
        """The share, once what is lost has grown often enough; else 0."""
        if self.pending is not None:
            self.looks.append((self.pending[0].read(), self.pending[1].read()))
        if len(self.looks) < WINDOW:
            return 0.0
        before, lost = (sum(column) for column in zip(*self.looks, strict=True))
        share, self.looks = lost / before if before else 0.0, []
        self.fast.add(lost, share > LARGE)
        self.steep.add(lost, share > SOME)
        self.windows.append(lost)
        if len(self.windows) == SPAN:
            self.slow.add(sum(self.windows), share > SOME)
            self.windows = []
        tell = self.fast.times >= GROWTHS or self.steep.times >= STEEPS
        return share if tell or self.slow.times >= LONG_GROWTHS else 0.0


class LostShare:
    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.here = True
        """Whether this process looks and warns."""
        self.tell: Callable[[str], None] = warnings.warn
        """A command shows warnings in its own way."""
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
        self.tell(
            f"{self.bits} bits are too few for this run: {share:.0%} of each change is lost on the "
            f"wire int{self.bits}, and that grows from round to round: use {REMEDY[self.bits]}, "
            "or a smaller step size if it grows there too"
        )
