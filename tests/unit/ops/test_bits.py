"""The mixing op, bit for bit: against numpy, and native against the torch reference."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hpc_oldsgd import ops
from hpc_oldsgd.ops import reference
from support import mix_inputs
from support.bits import same
from support.instruction_sets import digest_on
from support.mix_inputs import PAIR_NAMES, PAIRS, Case

SIZES = (0, 1, 7, 16, 1003, 20_011)
DEGREES = (0, 1, 2, 3, 8, 65)
pairs = pytest.mark.parametrize(("model", "wire"), PAIRS, ids=PAIR_NAMES)
native = pytest.mark.skipif(not ops.native_available(), reason="the extension is not built")


def run_gradient(c: Case, *, snapshot: bool, zero: bool, native: bool) -> None:
    y_next = c.y if snapshot else None
    if native:
        ops.fused_mix(
            c.x, c.y, c.neighbours, c.weights, c.acc, c.alpha, y_next=y_next, zero_acc=zero
        )
    else:
        reference.mix(c.x, c.y, c.neighbours, c.weights, c.acc, c.alpha, y_next, zero)


def run_delta(c: Case, *, snapshot: bool, native: bool) -> float:
    y_next = c.y if snapshot else None
    if native:
        d2 = ops.fused_mix_delta(c.x, c.y, c.neighbours, c.weights, y_next=y_next, distance=True)
        assert d2 is not None
    else:
        d2 = torch.empty((), dtype=torch.float64)
        reference.mix_delta(c.x, c.y, c.neighbours, c.weights, y_next, d2)
    return d2.item()


def assert_same(a: Case, b: Case) -> None:
    assert same(a.x, b.x), "x"
    assert same(a.y, b.y), "y"
    assert same(a.acc, b.acc), "acc"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("degree", [0, 1, 2, 5])
def test_is_the_equation(dtype: torch.dtype, degree: int) -> None:
    """numpy, one rounded operation per line."""
    c = mix_inputs.case(dtype, dtype, 501, degree)
    kind = c.x.numpy().dtype.type
    w = [kind(v) for v in c.weights]
    y = c.y.numpy()
    s = w[0] * y
    delta, d2 = np.zeros_like(y), np.zeros(501)
    for j, neighbour in enumerate(c.neighbours):
        s = s + w[j + 1] * neighbour.numpy()
        difference = neighbour.numpy() - y
        delta = delta + w[j + 1] * difference
        d2 = d2 + c.weights[j + 1] * difference.astype(np.float64) ** 2
    s = s - kind(c.alpha) * c.acc.numpy()
    x = c.x.numpy() + delta

    out = c.copy()
    run_gradient(out, snapshot=True, zero=True, native=True)
    assert np.array_equal(out.x.numpy(), s) and np.array_equal(out.y.numpy(), s)
    assert not out.acc.any()
    moved = c.copy()
    distance = run_delta(moved, snapshot=True, native=True)
    assert np.array_equal(moved.x.numpy(), x) and np.array_equal(moved.y.numpy(), x)
    assert distance == pytest.approx(d2.sum(), rel=1e-5)


@native
@pairs
def test_native_is_the_reference(model: torch.dtype, wire: torch.dtype) -> None:
    for n in SIZES:
        for degree in DEGREES:
            c = mix_inputs.case(model, wire, n, degree)
            for snapshot in (False, True):
                a, b = c.copy(), c.copy()
                run_gradient(a, snapshot=snapshot, zero=snapshot, native=True)
                run_gradient(b, snapshot=snapshot, zero=snapshot, native=False)
                assert_same(a, b)
                a, b = c.copy(), c.copy()
                d2 = run_delta(a, snapshot=snapshot, native=True)
                assert d2 == pytest.approx(run_delta(b, snapshot=snapshot, native=False), rel=1e-12)
                assert_same(a, b)


@native
@pairs
def test_any_alignment(model: torch.dtype, wire: torch.dtype) -> None:
    for offset in (1, 3, 8):
        c = mix_inputs.case(model, wire, 333, 3, offset=offset)
        a = Case(*(mix_inputs.buffer(333, t.dtype, t, offset) for t in (c.x, c.y)), c.neighbours,
                 c.weights, mix_inputs.buffer(333, model, c.acc, offset))  # fmt: skip
        b = c.copy()
        run_gradient(a, snapshot=True, zero=True, native=True)
        run_gradient(b, snapshot=True, zero=True, native=False)
        assert_same(a, b)


@native
@pairs
def test_special_values(model: torch.dtype, wire: torch.dtype) -> None:
    y, x = mix_inputs.special(wire), mix_inputs.special(model)
    c = Case(x, y, [y.flip(0), y.roll(3)], [0.5, 0.25, 0.25], x.roll(1), 0.125)
    for _ in range(2):
        a, b = c.copy(), c.copy()
        run_gradient(a, snapshot=True, zero=False, native=True)
        run_gradient(b, snapshot=True, zero=False, native=False)
        assert_same(a, b)
        a, b = c.copy(), c.copy()
        run_delta(a, snapshot=True, native=True)
        run_delta(b, snapshot=True, native=False)
        assert_same(a, b)
        # Only the rounding to the wire: 1 y + 0.
        c = Case(torch.zeros_like(x), y, [torch.zeros_like(y)], [1.0, 0.0], x, -1.0)


@native
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_and_every_tie_rounds_as_torch_does(wire: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(wire)
    values = every[every.isfinite()].double()
    values = values.sort().values.unique()
    between = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, between, between * (1 + 2**-20), between * (1 - 2**-20)]).float() + 0.0
    zero, y_next = torch.zeros(x.numel(), dtype=wire), torch.empty(x.numel(), dtype=wire)
    moved = x.clone()
    ops.fused_mix_delta(moved, zero, [], [1.0], y_next=y_next)
    assert same(moved, x) and same(y_next, x.to(wire))
    out = torch.empty(every.numel())
    ops.fused_mix(out, every, [], [1.0])
    assert same(out, every.float())


@native
@pytest.mark.parametrize(
    ("model", "wire"), [PAIRS[2], PAIRS[4]], ids=[PAIR_NAMES[2], PAIR_NAMES[4]]
)
def test_the_number_of_threads_changes_no_bit(model: torch.dtype, wire: torch.dtype) -> None:
    c = mix_inputs.case(model, wire, 300_007, 3)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        a = c.copy()
        run_gradient(a, snapshot=True, zero=True, native=True)
        b = c.copy()
        results.append((a, b, run_delta(b, snapshot=True, native=True)))
    for a, b, d2 in results[1:]:
        assert_same(a, results[0][0])
        assert_same(b, results[0][1])
        assert d2 == results[0][2]


@native
def test_all_threads_flush_subnormals_if_the_caller_does() -> None:
    """The setting belongs to a thread, and torch's other threads need not have it."""
    torch.set_num_threads(4)
    y = torch.full((1_000_003,), 1e-39)
    torch.ones(1_000_003).mul_(2.0)  # the threads are there before the setting changes
    out = torch.ones_like(y)
    assert torch.set_flush_denormal(True)
    try:
        ops.fused_mix(out, y, [y], [0.5, 0.5])
    finally:
        torch.set_flush_denormal(False)
    assert not out.view(torch.int32).any()


@native
def test_past_the_cache() -> None:
    """Larger than any last-level cache in sight: streaming stores, aligned or not."""
    n = 80_000_003
    y = (torch.arange(n, dtype=torch.int32) % 2039).half()
    for offset in (0, 1):
        out = torch.empty(n + 64, dtype=torch.float16)[offset : offset + n]
        y_next = torch.empty(n + 64, dtype=torch.float16)[offset : offset + n]
        ops.fused_mix(out, y, [y], [0.5, 0.25], y_next=y_next)
        expected = (y[:4096].float() * 0.5 + y[:4096].float() * 0.25).half()
        assert same(out[:4096], expected) and same(out, y_next)
        part = slice(n - 1_000_003, n)
        assert same(out[part], (y[part].float() * 0.5 + y[part].float() * 0.25).half())


def digest() -> str:
    """Of all results over all types, the distances included."""
    h = hashlib.sha256()
    for model, wire in PAIRS:
        for n, degree in ((1003, 2), (9001, 5), (15, 1), (40_000, 3)):
            c = mix_inputs.case(model, wire, n, degree)
            a = c.copy()
            run_gradient(a, snapshot=True, zero=False, native=True)
            d2 = run_delta(c, snapshot=True, native=True)
            for t in (a.x, a.y, c.x, c.y):
                h.update(t.view(torch.uint8).numpy().tobytes())
            h.update(d2.hex().encode())
    return h.hexdigest()


@native
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_the_instruction_set_changes_no_bit(isa: str) -> None:
    assert digest_on(isa, __file__) == digest()


@native
def test_an_unknown_instruction_set_is_named() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import hpc_oldsgd.ops"],
        env={**os.environ, "HPC_OLDSGD_ISA": "mmx"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0 and "use portable, avx2 or avx512" in ran.stderr
