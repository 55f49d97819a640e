"""The bits of every op on the device against the plain torch reference on the CPU."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
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


def _compare(cases: Sequence[Callable[[], Iterator[str]]], seconds: float) -> dict[str, Any]:
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


def _variant(k: int, kinds: list[Any]) -> int:
    """Its remainders choose the rest of case k: every kind meets all of them."""
    return k % len(kinds) + k // len(kinds)


def _mixed(device: torch.device, k: int) -> Iterator[str]:
    """Both forms; y_next is missing, apart or y itself in turn."""
    (model, wire), n, degree = _chosen(k, PAIRS)
    v = _variant(k, PAIRS)
    draw = _Draw(k, n, special=v % 2 == 1)
    own = [draw(model), draw(wire), draw(model), draw(wire)]  # x, y, acc, y_next
    near = [draw(wire, 10.0 ** (j % 5 - 2)) for j in range(degree)]
    w = draw.weights(degree)
    zero = v // 2 % 2 == 0

    def following(y: Tensor, apart: Tensor) -> Tensor | None:
        return (None, apart, y)[v % 3]

    def gradient(on_device: bool, x: Tensor, y: Tensor, acc: Tensor, apart: Tensor) -> None:
        given, y_next = acc if v % 5 else None, following(y, apart)
        empty = zero and given is not None
        if on_device:
            ops.fused_mix(x, y, moved, w, given, ALPHA, y_next=y_next, zero_acc=empty)
        else:
            reference.mix(x, y, near, w, given, ALPHA, y_next, empty)

    def delta(on_device: bool, x: Tensor, y: Tensor, acc: Tensor, apart: Tensor) -> Tensor | None:
        y_next = following(y, apart)
        if on_device:
            return ops.fused_mix_delta(x, y, moved, w, y_next=y_next, distance=zero)
        return _measured(zero, lambda d2: reference.mix_delta(x, y, near, w, y_next, d2))

    moved = _moved(near, device, v)
    what = f"{_name(model)} over {_name(wire)}, {n} numbers, degree {degree}"
    for form in (gradient, delta):
        yield from _both(f"{form.__name__} form, {what}", form, own, device, v)


def _narrow(device: torch.device, k: int) -> Iterator[str]:
    (model, bits), n, degree = _chosen(k, KINDS)
    v = _variant(k, KINDS)
    draw = _Draw(k, n, special=v % 2 == 1)
    x, copies, w = draw(model), [draw(model) for _ in range(degree)], draw.weights(degree)
    z = (x.double() + 0.01 * draw(torch.float64)).to(model)
    size = ops.message_bytes(n, bits)
    few = torch.zeros(min(degree, 3), size, dtype=torch.uint8)
    sent = torch.stack([draw(model) for _ in few])
    narrow_reference.encode(sent, torch.zeros_like(sent), few, bits)
    messages = [few[j % len(few)] for j in range(degree)]
    writes = v // 2 % 2 == 0

    def encode(on_device: bool, *own: Tensor) -> None:
        code = ops if on_device else narrow_reference
        code.encode(*(t.view(1, -1) for t in own), bits)

    def decode_add(on_device: bool, *own: Tensor) -> None:
        code = ops if on_device else narrow_reference
        code.decode_add(*(t.view(1, -1) for t in own), bits)

    def mix(on_device: bool, x: Tensor, z: Tensor, q: Tensor, *copies: Tensor) -> Tensor | None:
        following = q if writes else None
        if on_device:
            return ops.fused_mix_narrow(
                x, z, copies, moved, w, bits, next_message=following, distance=writes
            )
        run = narrow_reference.mix_narrow
        return _measured(writes, lambda d2: run(x, z, copies, messages, w, bits, following, d2))

    moved = _moved(messages, device, v)
    blank = torch.zeros(size, dtype=torch.uint8)
    what = f"int{bits}, {_name(model)}, {n} numbers, degree {degree}"
    forms: list[tuple[Any, list[Tensor]]] = [(encode, [x, z, blank]), (decode_add, [x, few[0]])]
    for form, own in [*forms, (mix, [x, z, blank, *copies])]:
        yield from _both(f"{form.__name__}, {what}", form, own, device, v)


def _measured(wanted: bool, run: Callable[[Tensor | None], None]) -> Tensor | None:
    d2 = torch.empty((), dtype=torch.float64) if wanted else None
    run(d2)
    return d2


def _both(
    what: str, form: Callable[..., Tensor | None], own: list[Tensor], device: torch.device, v: int
) -> Iterator[str]:
    """On the device and by the reference, each on copies of its own."""
    found, expected = _moved(own, device, v), [t.clone() for t in own]
    d2, right = form(True, *found), form(False, *expected)
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        count = differing(a.cpu(), b)
        if count:
            yield f"{what}: {count} of {b.numel()} numbers of tensor {place} differ"
    close = functools.partial(torch.allclose, rtol=DISTANCE, atol=0.0, equal_nan=True)
    if d2 is not None and right is not None and not close(d2.cpu(), right):
        yield f"{what}: the distance is {d2.item():.17g}, not {right.item():.17g}"


class _Draw:
    """Numbers of case k, the same on every machine; some are inf, NaN, tiny or halfway."""

    def __init__(self, k: int, n: int, special: bool) -> None:
        self.n, self.special, self.random = n, special, random.Random(k)

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


def _moved(tensors: Any, device: torch.device, v: int) -> list[Tensor]:
    """Copies on the device that start 0 to 3 elements past the beginning of their memory."""
    moved = []
    for t in tensors:
        memory = torch.empty(t.numel() + 4, dtype=t.dtype, device=device)
        moved.append(memory[v % 4 : v % 4 + t.numel()].copy_(t))
    return moved


def differing(a: Tensor, b: Tensor) -> int:
    """Numbers whose bits differ; any NaN is any other."""
    if not a.is_floating_point():
        return int((a != b).sum())
    bits = _WHOLE[a.element_size()]
    return int(((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum())


def _name(dtype: torch.dtype) -> str:
    return {8: "fp64", 4: "fp32"}.get(dtype.itemsize, "bf16" if "b" in str(dtype)[6:8] else "fp16")
