"""The difference wire: messages of 8 or 4 bits a number, and the pass that mixes by them.

    q_i = Q(x_i - z_i);  z_i <- z_i + q_i;  send q_i
    z_j <- z_j + q_j;    x_i <- x_i + sum_j w_j (z_j - z_i)

z_i is what the neighbours know of x_i, equal bit for bit at both ends. What Q loses is part of the
next difference. `narrow_reference` says what a message holds and how it is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import checks, narrow_native, narrow_reference, native

COMPILES_LISTS = torch.__version__ >= "2.5"
"""Before, torch compiled no op that changes the tensors of a list."""


def message_bytes(d: int, bits: int) -> int:
    """The bytes of a message of d numbers, scales included."""
    checks.narrow_bits(bits)
    return narrow_reference.message_bytes(d, bits)


def encode(x: Tensor, z: Tensor, message: Tensor, bits: int) -> None:
    """message = Q(x - z), and z += what it says.

    `message` has `message_bytes(d, bits)` numbers of type uint8. With a `message` of two dimensions
    each row of x (n, d) and z is encoded on its own; rows may lie apart.
    """
    run = _encode_op if checks.traced(x, z, message) else _encode
    run(x, z, message, bits)


def decode_add(z: Tensor, message: Tensor, bits: int) -> None:
    """z += what `message` says; rows as in `encode`."""
    run = _decode_add_op if checks.traced(z, message) else _decode_add
    run(z, message, bits)


def fused_mix_narrow(
    x: Tensor,
    z_self: Tensor,
    copies: Sequence[Tensor],
    messages: Sequence[Tensor],
    weights: Sequence[float],
    bits: int,
    *,
    next_message: Tensor | None = None,
    distance: bool = False,
) -> Tensor | None:
    """copies[j] += messages[j] decoded, x += sum_j weights[j+1] (copies[j] - z_self), in one pass.

    The rest of a round is done on the way: `next_message` receives Q(x - z_self) of the new x, and
    z_self += what it says. weights[0] is not used. With `distance`, returns
    sum_j weights[j+1] ||copies[j] - z_self||^2 (the new copies, the old z_self) as a float64 scalar
    tensor. The same bits as `decode_add`, `fused_mix_delta` and `encode` one after the other.
    """
    d2 = torch.empty((), dtype=torch.float64, device=x.device) if distance else None
    traced = checks.traced(x, z_self, next_message, *copies, *messages)
    run = _fused_mix_narrow if COMPILES_LISTS else _one_after_the_other
    run = run if traced else _mix_narrow
    run(x, z_self, copies, messages, weights, bits, next_message, d2)
    return d2


def _code_for(device: torch.device) -> ModuleType:
    return narrow_native if native.runs_on(device) else narrow_reference


# With arguments in the order of the schemas below.


def _encode(x: Tensor, z: Tensor, message: Tensor, bits: int) -> None:
    rows = checks.narrow_rows({"x": x, "z": z}, message, message_bytes(_width(x, message), bits))
    if not x.is_meta:
        _code_for(x.device).encode(*rows, bits)


def _decode_add(z: Tensor, message: Tensor, bits: int) -> None:
    rows = checks.narrow_rows({"z": z}, message, message_bytes(_width(z, message), bits))
    if not z.is_meta:
        _code_for(z.device).decode_add(*rows, bits)


def _width(x: Tensor, message: Tensor) -> int:
    return x.shape[1] if x.dim() == 2 and message.dim() == 2 else x.numel()


def _mix_narrow(*arguments: Any) -> None:
    x, z_self, copies, messages, weights, bits, next_message, distance = arguments
    weights, _ = checks.numbers(weights, 0.0)
    size = message_bytes(x.numel(), bits)
    checks.narrow(x, z_self, copies, messages, weights, next_message, size)
    if not x.is_meta:
        _code_for(x.device).mix_narrow(
            x, z_self, copies, messages, weights, bits, next_message, distance
        )


def _one_after_the_other(*arguments: Any) -> None:
    x, z_self, copies, messages, weights, bits, next_message, distance = arguments
    for z, message in zip(copies, messages, strict=True):
        _decode_add_op(z, message, bits)
    torch.ops.hpc_oldsgd.fused_mix_delta(x, z_self, copies, weights, None, distance)
    if next_message is not None:
        _encode_op(x, z_self, next_message, bits)


_encode_op = torch.library.custom_op(
    "hpc_oldsgd::encode",
    _encode,
    mutates_args=("z", "message"),
    schema="(Tensor x, Tensor(a!) z, Tensor(b!) message, int bits) -> ()",
)
_decode_add_op = torch.library.custom_op(
    "hpc_oldsgd::decode_add",
    _decode_add,
    mutates_args=("z",),
    schema="(Tensor(a!) z, Tensor message, int bits) -> ()",
)
_fused_mix_narrow = torch.library.custom_op(
    "hpc_oldsgd::fused_mix_narrow",
    _mix_narrow,
    mutates_args=("x", "z_self", "copies", "next_message", "distance"),
    schema="(Tensor(a!) x, Tensor(b!) z_self, Tensor(c!)[] copies, Tensor[] messages, "
    "float[] weights, int bits, Tensor(d!)? next_message, Tensor(e!)? distance) -> ()",
)


@_encode_op.register_fake
@_decode_add_op.register_fake
@_fused_mix_narrow.register_fake
def _(*args: Any) -> None:
    return None
