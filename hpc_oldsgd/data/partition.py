"""Which agent gets which training sample: iid, by label, Dirichlet.

A partition is a pure function of (labels, n, seed): each agent computes it alone and takes its own,
so the order of ranks does not matter. Every sample goes to exactly one agent, no agent is empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ..errors import UserError, unknown
from .seeding import Use, generator

Ints = npt.NDArray[np.int64]


class Partition(ABC):
    """How training samples are spread over agents."""

    @abstractmethod
    def deal(self, labels: Ints, n: int, rng: np.random.Generator) -> list[Ints]:
        """n disjoint arrays of sample indices that cover all samples."""

    def split(self, labels: npt.ArrayLike, n: int, seed: int = 0) -> list[Ints]:
        """The sample indices of each of n agents, sorted."""
        labels = np.asarray(labels, dtype=np.int64)
        if n < 1:
            raise UserError(f"a partition needs at least 1 agent, not {n}")
        if n > len(labels):
            raise UserError(
                f"{n} agents cannot share {len(labels)} training samples: use fewer agents"
            )
        parts = self.deal(labels, n, generator(Use.PARTITION, seed))
        _fill_empty(parts)
        return [np.sort(part) for part in parts]


@dataclass(frozen=True)
class Iid(Partition):
    """Every agent has the same number of samples, and of each label, up to one."""

    def deal(self, labels: Ints, n: int, rng: np.random.Generator) -> list[Ints]:
        by_label = _sorted_by_label(labels, rng)
        return [by_label[i::n] for i in range(n)]  # one by one: balances labels and sizes


@dataclass(frozen=True)
class Label(Partition):
    """Share s of an agent's samples by label (sorted, one slice per agent), the rest as in iid.

    Sizes are equal up to one. s = 0 is iid, s = 1 gives each agent only its own label or two.
    """

    s: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.s <= 1:
            raise UserError(f"the share by label must be between 0 and 1, not {self.s:g}")

    def deal(self, labels: Ints, n: int, rng: np.random.Generator) -> list[Ints]:
        by_label = _sorted_by_label(labels, rng)
        # Evenly spaced, so each label gives the same share of itself to the sliced pool.
        count = round(self.s * len(labels))
        steps = np.arange(len(labels) + 1) * count // len(labels)
        sliced = np.diff(steps) == 1
        slices = np.array_split(by_label[sliced], n)  # the first agents get one more,
        uniform = by_label[~sliced]
        rest = [uniform[i::n] for i in range(n)][::-1]  # here the last: sizes differ by at most one
        return [np.concatenate(both) for both in zip(slices, rest, strict=True)]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each label is spread over agents in proportions drawn from Dirichlet(alpha, ..., alpha).

    Small alpha is uneven in labels and sizes; large alpha approaches iid.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and np.isfinite(self.alpha)):
            raise UserError(f"the Dirichlet alpha must be positive, not {self.alpha:g}")

    def deal(self, labels: Ints, n: int, rng: np.random.Generator) -> list[Ints]:
        by_label = _sorted_by_label(labels, rng)
        parts: list[list[Ints]] = [[] for _ in range(n)]
        bounds = np.flatnonzero(np.diff(labels[by_label])) + 1
        for samples in np.split(by_label, bounds):
            shares = _dirichlet(self.alpha, n, rng)
            cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
            for part, piece in zip(parts, np.split(samples, cuts), strict=True):
                part.append(piece)
        return [np.concatenate(part) for part in parts]


PARTITIONS: dict[str, type[Partition]] = {"iid": Iid, "label": Label, "dirichlet": Dirichlet}


def parse(text: str | Partition) -> Partition:
    """ "iid", "label", "label:0.5", "dirichlet", "dirichlet:0.1"."""
    if isinstance(text, Partition):
        return text
    name, colon, value = text.strip().partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    cls = PARTITIONS[name]
    if not colon:
        return cls()
    options = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # all are dataclasses
    if not options:
        raise UserError(f"the partition {name} takes no number: write {name}, not {text!r}")
    try:
        number = float(value)
    except ValueError:
        raise UserError(
            f"{text!r} is not a partition: write {name}:NUMBER, such as {name}:0.5"
        ) from None
    return cls(number)  # type: ignore[call-arg]


def _sorted_by_label(labels: Ints, rng: np.random.Generator) -> Ints:
    """All indices by label, in random order within a label."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _dirichlet(alpha: float, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    shares = rng.dirichlet(np.full(n, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0.5:
        return shares
    shares = np.zeros(n)  # all gamma draws were 0: the limit gives everything to one agent
    shares[rng.integers(n)] = 1.0
    return shares


def _fill_empty(parts: list[Ints]) -> None:
    """Each agent without samples takes one from the agent that has most."""
    for i, part in enumerate(parts):
        if len(part) == 0:
            largest = max(range(len(parts)), key=lambda j: len(parts[j]))
            parts[i], parts[largest] = parts[largest][-1:], parts[largest][:-1]
