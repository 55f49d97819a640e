"""What the mixing ops accept. Everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UserError

TRANSFORMED = "inside vmap, grad or jvp: mix plain tensors outside of them."
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_PLAIN = (Tensor, torch.nn.Parameter, type(None))

Memory = tuple[str, int, int]
"""The name of an argument, its address, its bytes."""


def traced(*tensors: Tensor | None) -> bool:
    """For torch's dispatcher: a graph is being made, or there may be no memory behind a tensor."""
    if torch.compiler.is_compiling():
        return True
    for t in tensors:
        if type(t) not in _PLAIN:
            if not isinstance(t, Tensor):
                raise UserError(f"fused mixing takes torch tensors, not {type(t).__name__}.")
            return True
    return False


def numbers(weights: Iterable[Any], alpha: Any) -> tuple[list[float], float]:
    """Python floats; weights may be a tensor or an array too, and alpha a tensor."""
    weights = list(weights)
    for number in (*weights, alpha):
        if isinstance(number, Tensor) and number.requires_grad and torch.is_grad_enabled():
            raise UserError("weights or alpha require grad: pass plain numbers.")
    try:
        return [float(w) for w in weights], float(alpha)
    except (TypeError, ValueError):
        raise UserError("weights must be a list of real numbers, and alpha one.") from None
    except RuntimeError:  # torch has no number behind such a tensor
        raise UserError(f"weights or alpha are {TRANSFORMED}") from None


def mix(
    name: str,
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None,
    y_next: Tensor | None,
    zero_acc: bool,
) -> None:
    model, wire = x.dtype, y_self.dtype
    _types(model, wire)
    if len(weights) != len(neighbours) + 1:
        raise UserError(
            f"{len(weights)} weights for {len(neighbours)} neighbours: "
            f"pass {len(neighbours) + 1}, the own weight first."
        )
    n, device = x.numel(), x.device
    written = [_buffer(name, x, n, model, device)]
    read = [_buffer("y_self", y_self, n, wire, device)]
    read += [_buffer("a neighbour", t, n, wire, device) for t in neighbours]
    _same_shape({name: x, "y_self": y_self, "acc": acc, "y_next": y_next}, neighbours)
    if y_next is not None:
        written.append(_buffer("y_next", y_next, n, wire, device))
    if acc is not None and zero_acc:
        written.append(_buffer("acc", acc, n, model, device))
    elif acc is not None:
        read.append(_buffer("acc", acc, n, model, device))
    if n and not x.is_meta:
        _overlaps(written, read)


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
    # Other rows read y[i] after row i was written, so x may not even be the same buffer as y.
    apart = [_row_buffer(name, x, x), _buffer("y", y, size, y.dtype, x.device)]
    _buffer("indptr", indptr, n + 1, torch.int64, cpu)
    _buffer("indices", indices, nnz, torch.int64, cpu)
    _buffer("weights", weights, nnz, torch.float64, cpu)
    if self_weights is not None:
        _buffer("self_weights", self_weights, n, torch.float64, cpu)
    read = [] if acc is None else [_row_buffer("acc", acc, x)]
    if size:
        _overlaps(apart, read)


def graph(n: int, indptr: Tensor, indices: Tensor) -> None:
    """For the reference; the native code checks this itself."""
    nnz = indices.numel()
    if int(indptr[0]) != 0 or int(indptr[-1]) != nnz or bool((indptr[1:] < indptr[:-1]).any()):
        raise UserError(f"indptr must rise from 0 to the {nnz} indices.")
    if nnz and (int(indices.min()) < 0 or int(indices.max()) >= n):
        raise UserError(f"indices must lie in 0..{n - 1}, the rows of y.")


def narrow_bits(bits: int) -> None:
    if bits not in (8, 4):
        raise UserError(f"A number of a message has 8 or 4 bits, not {bits}.")


def narrow(
    x: Tensor,
    z_self: Tensor,
    copies: Sequence[Tensor],
    messages: Sequence[Tensor],
    weights: Sequence[float],
    next_message: Tensor | None,
    size: int,
) -> None:
    """`size` is the bytes of a message."""
    _types(x.dtype, x.dtype)
    if not len(copies) == len(messages) == len(weights) - 1:
        raise UserError(
            f"{len(copies)} copies, {len(messages)} messages and {len(weights)} weights: pass one "
            "message for each copy, and one weight more, the own weight first."
        )
    n, device = x.numel(), x.device
    written = [_buffer("x", x, n, x.dtype, device), _buffer("z_self", z_self, n, x.dtype, device)]
    written += [_buffer("a copy", z, n, x.dtype, device) for z in copies]
    read = [_buffer("a message", m, size, torch.uint8, device) for m in messages]
    if next_message is not None:
        written.append(_buffer("next_message", next_message, size, torch.uint8, device))
    _same_shape({"x": x, "z_self": z_self}, copies)
    if n and not x.is_meta:
        _overlaps(written, read)


def narrow_rows(models: dict[str, Tensor], message: Tensor, size: int) -> list[Tensor]:
    """The models and the message as rows; `size` is the bytes of a row of the message."""
    tensors = {**models, "message": message}
    first = next(iter(models.values()))
    _types(first.dtype, first.dtype)
    if message.dim() != 2 or first.dim() != 2:
        tensors = {name: _one_row(name, t) for name, t in tensors.items()}
    shape = next(iter(tensors.values())).shape
    written = []
    for name, t in tensors.items():
        expected = (shape[0], size if name == "message" else shape[1])
        dtype = torch.uint8 if name == "message" else first.dtype
        if t.shape != expected or (t.stride(1) != 1 and t.shape[1] > 1):
            raise UserError(
                f"{name} is {tuple(t.shape)}, expected {expected}, each row without gaps."
            )
        if t.stride(0) < t.shape[1] and t.shape[0] > 1:
            raise UserError(f"The rows of {name} overlap.")
        if not t.numel():
            continue
        row, last = _buffer(name, t[0], expected[1], dtype, first.device), t.shape[0] - 1
        written.append((name, row[1], row[2] + last * t.stride(0) * t.element_size()))
    if not first.is_meta:
        _overlaps(written, [])
    return list(tensors.values())


def _one_row(name: str, t: Tensor) -> Tensor:
    if not t.is_contiguous():
        raise UserError(f"{name} is not contiguous: pass a flat buffer.")
    return t.view(1, -1)


def copy(dst: Tensor, src: Tensor) -> None:
    cpu = torch.device("cpu")
    written = _buffer("dst", dst, dst.numel(), dst.dtype, cpu)
    _overlaps([written], [_buffer("src", src, dst.numel(), dst.dtype, cpu)])


def _types(model: torch.dtype, wire: torch.dtype) -> None:
    if model not in TYPES or wire not in TYPES:
        raise UserError(f"Cannot mix {model} over {wire}: use float32, float64, bfloat16, float16.")
    if wire != model and wire.itemsize >= model.itemsize:
        raise UserError(f"The wire type {wire} is neither the model type {model} nor narrower.")


def _buffer(name: str, t: Tensor, n: int, dtype: torch.dtype, device: torch.device) -> Memory:
    if t.dtype != dtype or t.numel() != n or t.device != device:
        raise UserError(
            f"{name} is {t.numel()} x {t.dtype} on {t.device}, expected {n} x {dtype} on {device}."
        )
    if not t.is_contiguous():
        raise UserError(f"{name} is not contiguous: pass a flat buffer.")
    if t.is_neg():  # its memory holds the opposite
        raise UserError(f"{name} is a negative view: pass its resolve_neg().")
    if t.requires_grad and torch.is_grad_enabled():  # the op has no derivative
        raise UserError(f"{name} requires grad: mix under torch.no_grad() or pass a plain buffer.")
    try:
        address = t.data_ptr()
        dual = not t.is_meta and forward_ad.unpack_dual(t).tangent is not None
    except RuntimeError:  # torch wraps what it transforms, without memory
        dual = True
    if dual:
        raise UserError(f"{name} is {TRANSFORMED}")
    if not address and n and not t.is_meta:  # a wrapper of torch's, as DTensor is
        raise UserError(f"{name} has no memory of its own: pass a plain tensor.")
    return name, address, n * dtype.itemsize


def _same_shape(named: dict[str, Tensor | None], neighbours: Sequence[Tensor]) -> None:
    """A flat buffer fits every shape of its size; two other shapes do not fit each other."""
    given = [(name, t) for name, t in named.items() if t is not None]
    given += [("a neighbour", t) for t in neighbours]
    shaped = [(name, t.shape) for name, t in given if t.dim() != 1]
    for name, shape in shaped[1:]:
        first, expected = shaped[0]
        if shape != expected:
            raise UserError(
                f"{name} is {tuple(shape)} and {first} is {tuple(expected)}: they have different "
                "shapes. Pass one shape, or flat buffers."
            )


def _row_buffer(name: str, t: Tensor, like: Tensor) -> Memory:
    """Rows may lie apart, as in a fragment of every agent's model; all matrices alike."""
    n, d = t.shape
    if t.is_contiguous() and like.is_contiguous():
        return _buffer(name, t, n * d, like.dtype, like.device)
    first = _buffer(name, t[0], d, like.dtype, like.device)
    if t.stride() != like.stride() or (t.stride(0) < d and n > 1):
        raise UserError(f"{name} must have rows that lie as those of the model.")
    return name, first[1], ((n - 1) * t.stride(0) + d) * t.element_size()


def _overlaps(written: Sequence[Memory], read: Sequence[Memory]) -> None:
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
