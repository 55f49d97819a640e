"""Any arguments of the mixing op: refused with nothing written, or the reference bit for bit."""

from __future__ import annotations

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpc_oldsgd import ops
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.ops import reference
from support.mix_inputs import same

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ODD_TYPES = (torch.int32, torch.bool, torch.complex64)
cases = settings(max_examples=int(os.environ.get("CASES", "25")))
weight = st.floats(width=32) | st.floats(-2, 2)


@st.composite
def tensors(draw: st.DrawFn, memory: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """n elements somewhere in a shared memory; now and then not what they should be."""
    kind = draw(st.sampled_from(["right"] * 12 + ["type", "size", "strided", "grad", "matrix"]))
    if kind == "type":
        dtype = draw(st.sampled_from((*TYPES, *ODD_TYPES)))
    if kind == "size":
        n = draw(st.integers(0, 9))
    at = draw(st.integers(0, 6)) * 64  # a few places only, so that some share memory
    at += draw(st.sampled_from([0, 0, 0, 8, 16]))
    view = memory[at : at + n * dtype.itemsize * 2].view(dtype)
    if kind == "strided":
        return view[::2]
    view = view[:n]
    if kind == "grad" and dtype.is_floating_point:
        return view.clone().requires_grad_()
    return view.reshape(1, n) if kind == "matrix" else view


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, object]:
    n = draw(st.integers(0, 9) | st.integers(15, 20))
    model, wire = draw(st.sampled_from(TYPES)), draw(st.sampled_from(TYPES))
    if draw(st.integers(0, 3)):
        wire = model
    memory = torch.frombuffer(
        bytearray(draw(st.binary(min_size=64, max_size=64)) * 16), dtype=torch.uint8
    )
    degree = draw(st.integers(0, 5))
    count = degree + 1 if draw(st.integers(0, 9)) else draw(st.integers(0, 4))
    return {
        "memory": memory,
        "x": draw(tensors(memory, n, model)),
        "y": draw(tensors(memory, n, wire)),
        "neighbours": [draw(tensors(memory, n, wire)) for _ in range(degree)],
        "weights": [draw(weight) for _ in range(count)],
        "acc": draw(st.none() | tensors(memory, n, model)),
        "alpha": draw(weight),
        "y_next": draw(st.none() | tensors(memory, n, wire)),
        "zero": draw(st.booleans()),
        "distance": draw(st.booleans()),
    }


def copies(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


@cases
@given(arguments(), st.booleans())
def test_any_arguments(a: dict[str, object], delta: bool) -> None:
    memory, x, y, y_next, acc = (a[key] for key in ("memory", "x", "y", "y_next", "acc"))
    assert isinstance(memory, Tensor) and isinstance(x, Tensor) and isinstance(y, Tensor)
    neighbours, weights = a["neighbours"], a["weights"]
    assert isinstance(neighbours, list) and isinstance(weights, list)
    before = memory.clone()
    expected = [copies(t) for t in (x, y, y_next, acc)]
    others = [t.detach().clone() for t in neighbours]
    zero = bool(a["zero"])
    try:
        if delta:
            ops.fused_mix_delta(
                x, y, neighbours, weights, y_next=y_next, distance=bool(a["distance"])
            )
        else:
            ops.fused_mix(
                x, y, neighbours, weights, acc, a["alpha"], y_next=y_next, zero_acc=zero
            )  # fmt: skip
    except UserError as error:
        assert "\n" not in str(error) and torch.equal(memory, before)
        return
    e_x, e_y, e_next, e_acc = expected
    assert e_x is not None and e_y is not None
    if delta:
        reference.mix_delta(e_x, e_y, others, weights, e_next, None)
    else:
        reference.mix(e_x, e_y, others, weights, e_acc, a["alpha"], e_next, zero)
    assert same(x.detach(), e_x)
    if isinstance(y_next, Tensor):
        assert e_next is not None and same(y_next.detach(), e_next)
    if zero and not delta and isinstance(acc, Tensor):
        assert not acc.any()


@cases
@given(st.data())
def test_any_graph(data: st.DataObject) -> None:
    """CSR arrays of anything: a graph, or refused before a row is written."""
    n, d = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 20))
    some = st.lists(st.integers(-1, 5), max_size=7)
    indices = torch.tensor(data.draw(some), dtype=torch.int64)
    steps = sorted(data.draw(st.lists(st.integers(0, len(indices)), max_size=n + 1)))
    indptr = torch.tensor(
        data.draw(st.just([0, *steps[: max(0, n - 1)], len(indices)]) | some), dtype=torch.int64
    )
    weights = torch.full((data.draw(st.sampled_from([len(indices), 3])),), 0.3, dtype=torch.float64)
    own = torch.full((n,), 0.5, dtype=torch.float64)
    x, y = torch.randn(n, d), torch.randn(n, d)
    before = x.clone()
    delta = data.draw(st.booleans())
    try:
        if delta:
            ops.mix_rows_delta(x, y, indptr, indices, weights)
        else:
            ops.mix_rows(x, y, indptr, indices, own, weights)
    except ValueError as error:  # the native code's own is one, as a UserError is
        assert "\n" not in str(error) and torch.equal(x, before)
        return
    expected = before.clone()
    if delta:
        reference.mix_rows_delta(expected, y, [indptr, indices, weights], None)
    else:
        reference.mix_rows(expected, y, [indptr, indices, own, weights], None, 0.0)
    assert torch.equal(x, expected)
