"""The difference wire, bit for bit: against numpy, against the torch reference, at both ends."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from hpc_oldsgd import ops
from hpc_oldsgd.ops import narrow_reference as reference
from support import mix_inputs, narrow_inputs
from support.bits import same
from support.instruction_sets import digest_on
from support.mix_inputs import TYPES
from support.narrow_inputs import Narrow

CASES = [(n, 2) for n in (0, 1, 2, 63, 64, 65, 1003, 4096 + 77)]
CASES += [(131, degree) for degree in range(7)]
TOP = {8: 127, 4: 7}
native = pytest.mark.skipif(not ops.native_available(), reason="the extension is not built")
widths = pytest.mark.parametrize("bits", [8, 4])
models = pytest.mark.parametrize("model", TYPES, ids=lambda t: str(t).removeprefix("torch."))


def run(c: Narrow, *, native: bool, snapshot: bool = True, distance: bool = True) -> float | None:
    q = c.next if snapshot else None
    if native:
        d2 = ops.fused_mix_narrow(
            c.x, c.z, c.copies, c.messages, c.weights, c.bits, next_message=q, distance=distance
        )
    else:
        d2 = torch.empty((), dtype=torch.float64) if distance else None
        reference.mix_narrow(c.x, c.z, c.copies, c.messages, c.weights, c.bits, q, d2)
    return None if d2 is None else d2.item()


def assert_same(a: Narrow, b: Narrow) -> None:
    for name, s, t in zip(("x", "z", *["a copy"] * len(a.copies), "next"), a.tensors(), b.tensors(),
                          strict=True):  # fmt: skip
        assert same(s, t), name


def empty_message(d: int, bits: int) -> Tensor:
    return torch.full((ops.message_bytes(d, bits),), 0xCD, dtype=torch.uint8)


@widths
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_is_the_equation(dtype: torch.dtype, bits: int) -> None:
    """numpy, one rounded operation per line."""
    c = narrow_inputs.case(dtype, bits, 333, 0)
    x, z = c.x.numpy(), c.z.numpy().copy()
    kind, codes, scales = x.dtype.type, [], []
    for i in range(0, 333, 64):
        delta = x[i : i + 64] - z[i : i + 64]
        exact = np.float32(np.abs(delta).max() / kind(TOP[bits]))
        scale = torch.tensor(float(exact)).bfloat16().item()
        code = np.rint(delta * (kind(1) / kind(scale))) if scale else np.zeros_like(delta)
        z[i : i + 64] += code * kind(scale)
        codes += code.astype(int).tolist()
        scales.append(scale)
    ops.encode(c.x, c.z, c.next, bits)
    assert np.array_equal(c.z.numpy(), z)
    assert max(map(abs, codes)) == TOP[bits]
    if bits == 4:
        codes.append(0)
        codes = [a & 15 | (b & 15) << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]
    codes += [0] * (-len(codes) % 4)
    assert [v & 255 for v in codes] == c.next[: len(codes)].tolist()
    assert c.next[len(codes) :].clone().view(torch.bfloat16).tolist() == scales


@widths
def test_the_bytes(bits: int) -> None:
    limit = {8: 0.27, 4: 0.14}[bits]
    for d in (1000, 9999, 1_000_003):
        assert ops.message_bytes(d, bits) <= limit * 4 * d
    assert ops.message_bytes(0, bits) == 0 and ops.message_bytes(1, bits) == 6


@native
@widths
@models
def test_native_is_the_reference(model: torch.dtype, bits: int) -> None:
    for n, degree in CASES:
        c = narrow_inputs.case(model, bits, n, degree)
        for snapshot in (False, True):
            a, b = c.copy(), c.copy()
            distance = degree % 2 == 0
            found = run(a, native=True, snapshot=snapshot, distance=distance)
            expected = run(b, native=False, snapshot=snapshot, distance=distance)
            assert_same(a, b)
            assert found == (expected and pytest.approx(expected, rel=1e-12))
    c = narrow_inputs.case(model, bits, 9001, 65)
    a, b = c.copy(), c.copy()
    assert run(a, native=True) == pytest.approx(run(b, native=False), rel=1e-12)
    assert_same(a, b)


@widths
@models
def test_one_pass_is_three(model: torch.dtype, bits: int) -> None:
    for n in (5, 64, 4200):
        c = narrow_inputs.case(model, bits, n, 3)
        a, b = c.copy(), c.copy()
        d2 = run(a, native=True)
        for z, q in zip(b.copies, b.messages, strict=True):
            ops.decode_add(z, q, bits)
        expected = ops.fused_mix_delta(b.x, b.z, b.copies, b.weights, distance=True)
        ops.encode(b.x, b.z, b.next, bits)
        assert_same(a, b)
        assert expected is not None and d2 == expected.item()


@native
@widths
@models
def test_any_alignment(model: torch.dtype, bits: int) -> None:
    for offset in (1, 3, 8):
        c = narrow_inputs.case(model, bits, 333, 2)
        a, b = c.moved(offset), c.copy()
        run(a, native=True)
        run(b, native=False)
        assert_same(a, b)


@native
@widths
@models
def test_special_values(model: torch.dtype, bits: int) -> None:
    some = mix_inputs.special(model)
    finite = some[some.isfinite()]
    for x in (some, finite, finite.repeat(3), some.repeat(5)):
        for z in (torch.zeros_like(x), x.flip(0), x.roll(3)):
            a, b = z.clone(), z.clone()
            q, expected = empty_message(x.numel(), bits), empty_message(x.numel(), bits)
            ops.encode(x, a, q, bits)
            reference.encode(x.view(1, -1), b.view(1, -1), expected.view(1, -1), bits)
            assert torch.equal(q, expected) and same(a, b)
            a, b = z.clone(), z.clone()
            ops.decode_add(a, q, bits)
            reference.decode_add(b.view(1, -1), expected.view(1, -1), bits)
            assert same(a, b)


@native
@widths
def test_any_bytes_decode_as_in_the_reference(bits: int) -> None:
    """Also codes that no sender makes (-128, -8), and scales that are negative, inf or NaN."""
    g = torch.Generator().manual_seed(1)
    for d in (64, 200, 5001):
        q = torch.randint(0, 256, empty_message(d, bits).shape, dtype=torch.uint8, generator=g)
        for model in TYPES:
            a = torch.randn(d, generator=g).to(model)
            b = a.clone()
            ops.decode_add(a, q, bits)
            reference.decode_add(b.view(1, -1), q.view(1, -1), bits)
            assert same(a, b)


@widths
@models
def test_what_is_not_finite_is_seen(model: torch.dtype, bits: int) -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        x, z = torch.ones(200, dtype=model), torch.zeros(200, dtype=model)
        x[70] = bad
        q = empty_message(200, bits)
        ops.encode(x, z, q, bits)
        assert z[64:128].isnan().all()  # its block
        assert torch.allclose(z[:64], x[:64], rtol=4e-3)
        assert torch.allclose(z[128:], x[128:], rtol=4e-3)


@widths
def test_a_huge_number_takes_its_block_and_a_tiny_one_waits(bits: int) -> None:
    x, z = torch.full((128,), 1e-3), torch.zeros(128)
    x[5] = 1e30
    q = empty_message(128, bits)
    ops.encode(x, z, q, bits)
    assert z[5].item() == pytest.approx(1e30, rel=4e-3) and z[:64].count_nonzero() == 1
    assert torch.allclose(z[64:], x[64:], rtol=4e-3)
    x, z = torch.full((64,), 1e-39), torch.zeros(64)  # a scale that has no inverse
    ops.encode(x, z, q[: ops.message_bytes(64, bits)], bits)
    assert not z.any() and not q[: ops.message_bytes(64, bits)].any()


@native
@widths
@models
def test_the_number_of_threads_changes_no_bit(model: torch.dtype, bits: int) -> None:
    c = narrow_inputs.case(model, bits, 300_007, 2)
    rows = torch.randn(3, 100_003).to(model)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        a, z = c.copy(), torch.zeros_like(rows)
        d2 = run(a, native=True)
        q = torch.empty(3, ops.message_bytes(100_003, bits), dtype=torch.uint8)
        ops.encode(rows, z, q, bits)
        sent = z.clone()
        ops.decode_add(z, q, bits)
        results.append((d2, *a.tensors(), sent, z, q))
    assert all(same(result, results[0]) for result in results[1:])


@widths
@models
def test_rows_are_single_messages(model: torch.dtype, bits: int) -> None:
    big = torch.randn(4, 150).to(model)
    x = big[:, 7:140]  # a fragment of every agent's model
    z = torch.zeros(4, 133, dtype=model)
    q = torch.empty(4, ops.message_bytes(133, bits), dtype=torch.uint8)
    expected = torch.zeros_like(z)
    for _ in range(2):
        ops.encode(x, z, q, bits)
        received = expected.clone()
        for i in range(4):
            single = empty_message(133, bits)
            ops.encode(x[i].clone(), expected[i], single, bits)
            assert torch.equal(single, q[i])
        ops.decode_add(received, q, bits)
        assert same(z, expected) and same(received, expected)


@widths
@models
def test_both_ends_agree_and_the_mean_stays(model: torch.dtype, bits: int) -> None:
    """A ring of agents, each with its own copies of its neighbours, and gradients of its own."""
    n, d, rounds = 5, 777, 40
    g = torch.Generator().manual_seed(0)
    X = torch.randn(n, d, generator=g, dtype=torch.float64).to(model)
    mean = X.double().mean(0)
    near = [[(i - 1) % n, (i + 1) % n] for i in range(n)]
    Z = torch.zeros(n, d, dtype=model)
    copies = [[torch.zeros(d, dtype=model) for _ in near[i]] for i in range(n)]
    sent = [empty_message(d, bits) for _ in range(n)]
    for i in range(n):
        ops.encode(X[i], Z[i], sent[i], bits)
    start = float((X.double() - mean).norm())
    for r in range(rounds):
        arrived, sent = sent, [empty_message(d, bits) for _ in range(n)]
        before = Z.clone()
        for i in range(n):
            messages = [arrived[j] for j in near[i]]
            ops.fused_mix_narrow(
                X[i], Z[i], copies[i], messages, [0.4, 0.3, 0.3], bits, next_message=sent[i]
            )
        for i in range(n):
            for z, j in zip(copies[i], near[i], strict=True):
                assert same(z, before[j]), f"round {r}"
        if r < rounds - 20:  # the gradients' mean is 0, up to what the type can hold
            noise = torch.randn(n, d, generator=g, dtype=torch.float64) * 0.01
            X += (noise - noise.mean(0)).to(model)
    exact = torch.finfo(model).eps
    assert float((X.double().mean(0) - mean).abs().max()) < 30 * exact
    assert float((X.double() - mean).norm()) < 0.02 * start


def digest() -> str:
    """Of all results over all types, the distances included."""
    h = hashlib.sha256()
    for model in TYPES:
        for bits in (8, 4):
            for n, degree in ((1003, 2), (9001, 5), (15, 1)):
                c = narrow_inputs.case(model, bits, n, degree)
                d2 = run(c, native=True)
                assert d2 is not None
                for t in c.tensors():
                    h.update(t.view(torch.uint8).numpy().tobytes())
                h.update(d2.hex().encode())
    return h.hexdigest()


@native
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_the_instruction_set_changes_no_bit(isa: str) -> None:
    assert digest_on(isa, __file__) == digest()
