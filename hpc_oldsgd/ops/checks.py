"""What the mixing ops accept. Everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

CODE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

Addresses = tuple[int, int, list[int], int, int]
"""Of out or x, y_self, the neighbours, acc and y_next; 0 where there is none."""


def numbers(weights: Iterable[Any], alpha: Any) -> tuple[list[float], float]:
    """Also of a tensor or an array, and of their elements."""
    try:
        return [float(w) for w in weights], float(alpha)
    except (TypeError, ValueError):
        raise UserError("weights must be a list of real numbers, and alpha one.") from None


def mix(
    name: str,
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None,
    y_next: Tensor | None,
    zero_acc: bool,
) -> Addresses:
    model, wire = x.dtype, y_self.dtype
    _types(model, wire)
    if len(weights) != len(neighbours) + 1:
        raise UserError(
            f"{len(weights)} weights for {len(neighbours)} neighbours: "
            f"pass {len(neighbours) + 1}, the own weight first."
        )
    n, device = x.numel(), x.device
    a_x = _buffer(name, x, n, model, device)
    a_y = _buffer("y_self", y_self, n, wire, device)
    a_nbr = [_buffer("a neighbour", t, n, wire, device) for t in neighbours]
    a_acc = 0 if acc is None else _buffer("acc", acc, n, model, device)
    a_next = 0 if y_next is None else _buffer("y_next", y_next, n, wire, device)

    model_bytes, wire_bytes = n * model.itemsize, n * wire.itemsize
    written = [(name, a_x, model_bytes)]
    read = [("y_self", a_y, wire_bytes), *(("a neighbour", a, wire_bytes) for a in a_nbr)]
    if y_next is not None:
        _no_grad("y_next", y_next)
        written.append(("y_next", a_next, wire_bytes))
    if acc is not None:
        if zero_acc:
            _no_grad("acc", acc)
        (written if zero_acc else read).append(("acc", a_acc, model_bytes))
    _no_grad(name, x)
    if n and not x.is_meta:
        _overlaps(written, read)
    return a_x, a_y, a_nbr, a_acc, a_next


def rows(
    name: str,
    x: Tensor,
    y: Tensor,
    indptr: Tensor,
    indices: Tensor,
    weights: Tensor,
    self_weights: Tensor | None,
    acc: Tensor | None,
) -> None:
    _types(x.dtype, y.dtype)
    if x.dim() != 2 or x.shape != y.shape or (acc is not None and acc.shape != x.shape):
        raise UserError(f"{name}, y and acc must all be (n, d): got {_shapes(x, y, acc)}.")
    n, size, nnz = x.shape[0], x.numel(), indices.numel()
    cpu = torch.device("cpu")
    written = [(name, _buffer(name, x, size, x.dtype, x.device), size * x.dtype.itemsize)]
    read = [("y", _buffer("y", y, size, y.dtype, x.device), size * y.dtype.itemsize)]
    _buffer("indptr", indptr, n + 1, torch.int64, cpu)
    _buffer("indices", indices, nnz, torch.int64, cpu)
    _buffer("weights", weights, nnz, torch.float64, cpu)
    if self_weights is not None:
        _buffer("self_weights", self_weights, n, torch.float64, cpu)
    _no_grad(name, x)
    if acc is not None:
        read.append(("acc", _buffer("acc", acc, size, x.dtype, x.device), written[0][2]))
    if size:
        # Other rows read y[i] after row i was written, so not even the same buffer will do.
        _overlaps(written + read[:1], read[1:])


def graph(n: int, indptr: Tensor, indices: Tensor) -> None:
    """What the native code checks by itself."""
    nnz = indices.numel()
    if int(indptr[0]) != 0 or int(indptr[-1]) != nnz or bool((indptr[1:] < indptr[:-1]).any()):
        raise UserError(f"indptr must rise from 0 to the {nnz} indices.")
    if nnz and (int(indices.min()) < 0 or int(indices.max()) >= n):
        raise UserError(f"indices must lie in 0..{n - 1}, the rows of y.")


def copy(dst: Tensor, src: Tensor) -> None:
    cpu = torch.device("cpu")
    size = dst.numel() * dst.element_size()
    written = [("dst", _buffer("dst", dst, dst.numel(), dst.dtype, cpu), size)]
    _overlaps(written, [("src", _buffer("src", src, dst.numel(), dst.dtype, cpu), size)])


def _types(model: torch.dtype, wire: torch.dtype) -> None:
    if model not in CODE or wire not in CODE:
        raise UserError(f"Cannot mix {model} over {wire}: use float32, float64, bfloat16, float16.")
    if wire != model and wire.itemsize >= model.itemsize:
        raise UserError(f"The wire type {wire} is neither the model type {model} nor narrower.")


def _buffer(name: str, t: Tensor, n: int, dtype: torch.dtype, device: torch.device) -> int:
    if t.dtype != dtype or t.numel() != n or t.device != device:
        raise UserError(
            f"{name} is {t.numel()} x {t.dtype} on {t.device}, expected {n} x {dtype} on {device}."
        )
    if not t.is_contiguous():
        raise UserError(f"{name} is not contiguous: pass a flat buffer.")
    if t.is_neg():  # its memory holds the opposite
        raise UserError(f"{name} is a negative view: pass its resolve_neg().")
    address = t.data_ptr()
    if not address and n and not t.is_meta:  # a wrapper of torch's, as DTensor is
        raise UserError(f"{name} has no memory of its own: pass a plain tensor.")
    return address


def _no_grad(name: str, t: Tensor) -> None:
    if t.requires_grad and torch.is_grad_enabled():
        raise UserError(f"{name} requires grad: mix under torch.no_grad() or pass a plain buffer.")


def _overlaps(written: list[tuple[str, int, int]], read: list[tuple[str, int, int]]) -> None:
    """An output may be an input exactly (it is read before it is written), never partly."""
    for k, (name, a, size) in enumerate(written):
        for other, b, other_size in written[:k]:
            if a < b + other_size and b < a + size:
                raise UserError(f"{name} and {other} must not share memory.")
        for other, b, other_size in read:
            if a < b + other_size and b < a + size and (a != b or size != other_size):
                raise UserError(f"{name} partly overlaps {other}: pass the same or other memory.")


def _shapes(*tensors: Tensor | None) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors if t is not None)
