"""Inputs of the mixing op over all its types, and comparison bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(m, w) for m, w in itertools.product(TYPES, TYPES) if m == w or w.itemsize < m.itemsize]
PAIR_NAMES = [f"{m}-{w}".replace("torch.", "") for m, w in PAIRS]
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, so 0.0 is not -0.0; any NaN is any other."""
    bits = _BITS[a.element_size()]
    equal = a.view(bits) == b.view(bits)
    return a.dtype == b.dtype and bool((equal | (a.isnan() & b.isnan())).all())


@dataclass
class Case:
    """Arguments of both forms. Scales differ between buffers, so that the order of sums matters."""

    x: Tensor
    y: Tensor
    neighbours: list[Tensor]
    weights: list[float]
    acc: Tensor
    alpha: float = 0.37

    def copy(self) -> Case:
        return replace(self, x=self.x.clone(), y=self.y.clone(), acc=self.acc.clone())


def buffer(n: int, dtype: torch.dtype, values: Tensor, offset: int = 0) -> Tensor:
    """`values` in memory that starts `offset` elements past a 64-byte boundary."""
    memory = torch.empty(n + offset + 64, dtype=dtype)
    start = (-memory.data_ptr() % 64) // dtype.itemsize + offset
    return memory[start : start + n].copy_(values)


def case(
    model: torch.dtype, wire: torch.dtype, n: int, degree: int, *, offset: int = 0, seed: int = 0
) -> Case:
    g = torch.Generator().manual_seed(1000 * seed + 10 * degree + n)

    def values(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return buffer(n, dtype, torch.randn(n, generator=g, dtype=torch.float64) * scale, offset)

    neighbours = [values(wire, 10.0 ** (j % 5 - 2)) for j in range(degree)]
    weights = torch.rand(degree + 1, generator=g, dtype=torch.float64).tolist()
    return Case(values(model), values(wire), neighbours, weights, values(model))


def special(dtype: torch.dtype) -> Tensor:
    """Zeros, infinities, NaN, the largest, the smallest, subnormals, ties of the 16-bit types."""
    info = torch.finfo(dtype)
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2049.0, 2051.0, 65519.9, 65520.0]
    ties += [2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14 - 2.0**-25, 1e-40, 3e38, 3.4e38]
    some = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        info.max,
        info.tiny,
        info.tiny / 4,
    ]
    some += ties
    return torch.tensor(some + [-v for v in some], dtype=torch.float64).to(dtype)


class Wrapped(Tensor):
    """As DTensor is: a type of its own around the memory of another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = torch.utils._pytree.tree_map_only(Wrapped, lambda w: w.inner, args)
        return f(*args, **(kwargs or {}))
