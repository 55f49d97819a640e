"""The bits of every op on the device against the plain torch reference on the CPU."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...ops import narrow_reference, native, reference

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(m, w) for m, w in itertools.product(TYPES, TYPES) if m == w or w.itemsize < m.itemsize]
KINDS = list(itertools.product(TYPES, (8, 4)))
SIZES = (65_539, 1, 3, 64, 127, 1001, 1_200_001)
DEGREES = (2, 1, 3, 8, getattr(native.extension, "MAX_FIXED_DEGREE", 64) + 2)
MOST = 3 << 20  # numbers of a case, of all neighbours together
POOL = 1 << 21
SHOWN = 3  # wrong cases that are named
DISTANCE = 1e-9  # its sum is taken in another order on every device
ALPHA = 0.37
_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def wide(device: torch.device, seconds: float) -> dict[str, Any]:
    """fused_mix and fused_mix_delta, over all pairs of types of model and wire."""
    cases = [partial(_mixed, device, k) for k in range(len(PAIRS) * len(SIZES) * len(DEGREES))]
    return _compare(cases, seconds)


def narrow(device: torch.device, seconds: float) -> dict[str, Any]:
    """encode, decode_add and fused_mix_narrow, of 8 and 4 bits."""
    cases = [partial(_narrow, device, k) for k in range(len(KINDS) * len(SIZES) * len(DEGREES))]
    return _compare(cases, seconds)


def _compare(cases: list[Callable[[], Iterator[str]]], seconds: float) -> dict[str, Any]:
    start, wrong, done = time.perf_counter(), [], 0
    for case in cases:
        if done and time.perf_counter() - start > seconds:
            break
        wrong += list(case())
        done += 1
    return {"cases": done, "of": len(cases), "wrong": len(wrong), "first": wrong[:SHOWN]}


def _chosen(k: int, kinds: list[Any]) -> tuple[Any, int, int]:
    """Kind, numbers and degree of case k.

    7 sizes, 5 degrees and 8 or 9 kinds have no common divisor. So the first nine cases meet each
    of them, and all cases meet every combination.
    """
    n, degree = SIZES[k % len(SIZES)], DEGREES[k % len(DEGREES)]
    return kinds[k % len(kinds)], min(n, MOST // (degree + 1) | 1), degree


def _mixed(device: torch.device, k: int) -> Iterator[str]:
    """Case k in both forms; y_next is missing, apart or y itself in turn."""
    (model, wire), n, degree = _chosen(k, PAIRS)
    draw = _Draw(k, n)
    x, y, acc, apart = draw(model), draw(wire), draw(model), draw(wire)
    near = [draw(wire, 10.0 ** (j % 5 - 2)) for j in range(degree)]
    w = draw.weights(degree)
    what = f"{_name(model)} over {_name(wire)}, {n} numbers, degree {degree}"

    def run(x: Tensor, y: Tensor, acc: Tensor, apart: Tensor, near: list[Tensor], on: Any) -> Any:
        y_next = (None, apart, y)[k % 3]
        given, zero = (None, False) if k % 4 == 3 else (acc, k % 2 == 0)
        on.mix(x, y, near, w, given, ALPHA, y_next, zero)
        d2 = torch.full((), -1.0, dtype=torch.float64, device=x.device)
        on.mix_delta(x, y, near, w, y_next, d2)
        return [x, y, acc, apart], d2

    found, d2 = run(*_moved((x, y, acc, apart), device, k), _moved(near, device, k), _Device)
    expected, right = run(x, y, acc, apart, near, reference)
    yield from _differences(f"mix, {what}", ("x", "y", "acc", "y_next"), found, expected)
    if not torch.allclose(d2.cpu(), right, rtol=DISTANCE, atol=0.0, equal_nan=True):
        yield f"distance, {what}: {d2.item():.17g}, not {right.item():.17g}"


def _narrow(device: torch.device, k: int) -> Iterator[str]:
    (model, bits), n, degree = _chosen(k, KINDS)
    draw = _Draw(k, n)
    x, copies, w = draw(model), [draw(model) for _ in range(degree)], draw.weights(degree)
    z = (x.double() + 0.01 * draw(torch.float64)).to(model)
    size = ops.message_bytes(n, bits)
    few = torch.zeros(min(degree, 3), size, dtype=torch.uint8)
    sent = torch.stack([draw(model) for _ in few])
    narrow_reference.encode(sent, torch.zeros_like(sent), few, bits)
    messages = [few[j % len(few)] for j in range(degree)]
    following = torch.zeros(size, dtype=torch.uint8)
    what = f"int{bits}, {_name(model)}, {n} numbers, degree {degree}"

    def run(x: Tensor, z: Tensor, q: Tensor, copies: Any, messages: Any, on: Any) -> Any:
        on.encode(x.view(1, -1), z.view(1, -1), q.view(1, -1), bits)
        on.decode_add(copies[0].view(1, -1), q.view(1, -1), bits)
        d2 = torch.full((), -1.0, dtype=torch.float64, device=x.device)
        on.mix_narrow(x, z, copies, messages, w, bits, q if k % 2 else None, d2)
        return [x, z, q, *copies], d2

    own = (x, z, following)
    moved = _moved(copies, device, k), _moved(messages, device, k)
    found, d2 = run(*_moved(own, device, k), *moved, _Device)
    expected, right = run(*own, copies, messages, narrow_reference)
    names = ("x", "z", "message", *(f"copy {j}" for j in range(degree)))
    yield from _differences(what, names, found, expected)
    if not torch.allclose(d2.cpu(), right, rtol=DISTANCE, atol=0.0, equal_nan=True):
        yield f"distance, {what}: {d2.item():.17g}, not {right.item():.17g}"


class _Device:
    """The public ops, called as the references are."""

    @staticmethod
    def mix(x: Tensor, y: Tensor, near: Any, w: Any, acc: Any, alpha: float, *last: Any) -> None:
        y_next, zero = last
        ops.fused_mix(x, y, near, w, acc, alpha, y_next=y_next, zero_acc=zero)

    @staticmethod
    def mix_delta(x: Tensor, y: Tensor, near: Any, w: Any, y_next: Any, d2: Tensor) -> None:
        measured = ops.fused_mix_delta(x, y, near, w, y_next=y_next, distance=True)
        assert measured is not None
        d2.copy_(measured)

    @staticmethod
    def encode(x: Tensor, z: Tensor, q: Tensor, bits: int) -> None:
        ops.encode(x, z, q, bits)

    @staticmethod
    def decode_add(z: Tensor, q: Tensor, bits: int) -> None:
        ops.decode_add(z, q, bits)

    @staticmethod
    def mix_narrow(
        x: Tensor, z: Tensor, copies: Any, messages: Any, w: Any, bits: int, q: Any, d2: Tensor
    ) -> None:
        measured = ops.fused_mix_narrow(
            x, z, copies, messages, w, bits, next_message=q, distance=True
        )
        assert measured is not None
        d2.copy_(measured)


class _Draw:
    """Numbers of case k, the same on every machine; some are inf, NaN, tiny or halfway."""

    def __init__(self, k: int, n: int) -> None:
        self.n, self.special, self.random = n, k % 2 == 1, random.Random(k)

    def __call__(self, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        start = self.random.randrange(POOL - self.n)
        values = _pool()[start : start + self.n] * scale
        if self.special and self.n > 64:
            for value in SPECIAL:
                values[self.random.randrange(self.n)] = value
        return values.to(dtype)

    def weights(self, degree: int) -> list[float]:
        return [self.random.random() for _ in range(degree + 1)]


@functools.cache
def _pool() -> Tensor:
    """Of which every tensor is a piece: drawing them takes longer than mixing them."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


SPECIAL = (
    *(0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3.4e38, 65519.9, 65520.0),
    *(1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14 - 2.0**-25),
)


def _moved(tensors: Any, device: torch.device, k: int) -> list[Tensor]:
    """Copies on the device that start 0 to 3 elements past the beginning of their memory."""
    moved = []
    for t in tensors:
        memory = torch.empty(t.numel() + 4, dtype=t.dtype, device=device)
        moved.append(memory[k % 4 : k % 4 + t.numel()].copy_(t))
    return moved


def _differences(what: str, names: Any, found: Any, expected: Any) -> Iterator[str]:
    for name, a, b in zip(names, found, expected, strict=True):
        count = differing(a.cpu(), b)
        if count:
            yield f"{what}: {count} of {b.numel()} numbers of {name} differ"


def differing(a: Tensor, b: Tensor) -> int:
    """Numbers whose bits differ; any NaN is any other."""
    if not a.is_floating_point():
        return int((a != b).sum())
    bits = _WHOLE[a.element_size()]
    return int(((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum())


def _name(dtype: torch.dtype) -> str:
    return {8: "fp64", 4: "fp32"}.get(dtype.itemsize, "bf16" if "b" in str(dtype)[6:8] else "fp16")
