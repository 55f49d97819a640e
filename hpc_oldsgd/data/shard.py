"""Samples as arrays with a common first axis, and the part of them that one agent draws from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UserError
from .partition import Ints
from .seeding import Use, generator

Rows = tuple[npt.NDArray[Any], ...]
Batch = tuple[Tensor, ...]
Collate = Callable[[Rows, np.random.Generator | None], Batch]
"""Rows as stored -> tensors for the loss; augments when it gets a generator."""


class Source(Protocol):
    """A data set that need not be in memory: only the rows asked for are."""

    @property
    def labels(self) -> Ints:
        """One integer per sample, for partitions."""

    def rows(self, indices: Ints) -> Rows:
        """These samples, copied out of the data set."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """A Source over arrays that are in memory anyway; the last one is the labels."""

    arrays: Rows

    @property
    def labels(self) -> Ints:
        return np.asarray(self.arrays[-1], dtype=np.int64)

    def rows(self, indices: Ints) -> Rows:
        return tuple(a[indices] for a in self.arrays)


@dataclass(eq=False)
class Samples:
    """Some samples in memory, for measuring a model on them in a fixed order."""

    rows: Rows
    collate: Collate

    def __len__(self) -> int:
        return len(self.rows[0])

    def batches(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self), size):
            yield self.collate(tuple(a[start : start + size] for a in self.rows), None)


@dataclass(eq=False)
class Shard:
    """Agent i's samples and the order in which it draws them.

    Batches are cut from one endless stream of epochs, each a permutation of the shard seeded by
    (seed, i, epoch): all batches have the same size, and each sample comes once per epoch.
    """

    i: int
    indices: Ints
    """Where these samples are in the training set."""
    rows: Rows
    batch_size: int
    seed: int
    collate: Collate
    _orders: dict[int, Ints] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_finite("training", self.rows, self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.rows)

    def batch(self, k: int) -> Batch:
        """The k-th batch that agent i draws, a pure function of (seed, i, k)."""
        picks = self.picks(k)
        rows = tuple(a[picks] for a in self.rows)
        return self.collate(rows, generator(Use.AUGMENT, self.seed, self.i, k))

    def picks(self, k: int) -> Ints:
        """Which of the shard's samples batch k consists of."""
        if k < 0:
            raise UserError(f"batches are counted from 0, not {k}")
        place = np.arange(k * self.batch_size, (k + 1) * self.batch_size)
        epoch, offset = np.divmod(place, len(self))
        return np.concatenate(
            [self._order(int(e))[offset[epoch == e]] for e in range(epoch[0], epoch[-1] + 1)]
        )

    def _order(self, epoch: int) -> Ints:
        if epoch not in self._orders:
            for old in [e for e in self._orders if e < epoch - 1]:
                del self._orders[old]
            rng = generator(Use.ORDER, self.seed, self.i, epoch)
            self._orders[epoch] = rng.permutation(len(self))
        return self._orders[epoch]


def check_finite(what: str, rows: Rows, indices: Ints) -> None:
    for column in rows:
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            bad = ~np.isfinite(column).reshape(len(column), -1).all(axis=1)
            raise UserError(
                f"{what} sample {indices[int(bad.argmax())]} holds NaN or infinity: clean the data "
                "first"
            )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    return tuple(t.to(device, non_blocking=True) for t in batch)
