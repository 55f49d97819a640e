"""The fused mixing op, in its two forms, as torch custom ops over the native code.

    gradient form   out = w_0 y_i + sum_j w_j y_j - alpha acc
    delta form      x  += sum_j w_j (y_j - y_i)

Each is one pass over memory, and each writes the next wire snapshot in that pass. The order is
fixed: self, the neighbours as given, the accumulator, every product rounded before it is added. So
the result is the same bit for bit on every instruction set, for every number of threads, in one
row or in many, and in the plain torch reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import checks, native, reference
from .narrow import decode_add, encode, fused_mix_narrow, message_bytes

__all__ = [
    "build_info",
    "decode_add",
    "encode",
    "fused_mix",
    "fused_mix_delta",
    "fused_mix_narrow",
    "message_bytes",
    "mix_rows",
    "mix_rows_delta",
    "native_available",
    "stream_copy",
]


def native_available() -> bool:
    return native.extension is not None


def build_info() -> dict[str, object]:
    """Compiler, instruction set in use, CUDA architectures; or why the torch reference is used."""
    if native.extension is None:
        return {"native": False, "reason": native.why_not, "cuda": False}
    return {"native": True, **native.extension.build_info()}


def _code_for(device: torch.device) -> ModuleType:
    return native if native.runs_on(device) else reference


def _row_code_for(device: torch.device) -> ModuleType:
    return _code_for(device) if device.type == "cpu" else reference


def fused_mix(
    out: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None = None,
    alpha: float = 0.0,
    *,
    y_next: Tensor | None = None,
    zero_acc: bool = False,
) -> None:
    """out = weights[0] y_self + sum_j weights[j+1] neighbours[j] - alpha acc, in one pass.

    `y_next` receives out rounded to the wire type and may be `y_self` itself; `zero_acc` leaves
    acc = 0.
    """
    mix = _fused_mix if checks.traced(out, y_self, acc, y_next, *neighbours) else _mix
    if mix is _fused_mix and isinstance(alpha, Tensor):
        raise UserError("alpha is a tensor, which no traced graph can hold: pass float(alpha).")
    mix(out, y_self, neighbours, weights, acc, alpha, y_next, zero_acc)


def fused_mix_delta(
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    *,
    y_next: Tensor | None = None,
    distance: bool = False,
) -> Tensor | None:
    """x += sum_j weights[j+1] (neighbours[j] - y_self), in one pass; weights[0] is not used.

    `y_next` receives the new x rounded to the wire type and may be `y_self` itself. With
    `distance`, returns sum_j weights[j+1] ||neighbours[j] - y_self||^2 as a float64 scalar tensor.
    """
    d2 = torch.empty((), dtype=torch.float64, device=x.device) if distance else None
    mix = _fused_mix_delta if checks.traced(x, y_self, y_next, *neighbours) else _mix_delta
    mix(x, y_self, neighbours, weights, y_next, d2)
    return d2


# The two forms, with arguments in the order of the schemas below.


def _mix(*arguments: Any) -> None:
    out, y_self, neighbours, weights, acc, alpha, y_next, zero_acc = arguments
    weights, alpha = checks.numbers(weights, alpha)
    checks.mix("out", out, y_self, neighbours, weights, acc, y_next, zero_acc)
    if not out.is_meta:
        code = _code_for(out.device)
        code.mix(out, y_self, neighbours, weights, acc, alpha, y_next, zero_acc)


def _mix_delta(*arguments: Any) -> None:
    x, y_self, neighbours, weights, y_next, distance = arguments
    weights, _ = checks.numbers(weights, 0.0)
    checks.mix("x", x, y_self, neighbours, weights, None, y_next, False)
    if not x.is_meta:
        _code_for(x.device).mix_delta(x, y_self, neighbours, weights, y_next, distance)


# The ops as torch sees them: traced by torch.compile and torch.export, faked without data. Schemas
# are written out, since what torch infers them from differs between its versions.

_fused_mix = torch.library.custom_op(
    "hpc_oldsgd::fused_mix",
    _mix,
    mutates_args=("out", "acc", "y_next"),
    schema="(Tensor(a!) out, Tensor y_self, Tensor[] neighbours, float[] weights, "
    "Tensor(b!)? acc, float alpha, Tensor(c!)? y_next, bool zero_acc) -> ()",
)
_fused_mix_delta = torch.library.custom_op(
    "hpc_oldsgd::fused_mix_delta",
    _mix_delta,
    mutates_args=("x", "y_next", "distance"),
    schema="(Tensor(a!) x, Tensor y_self, Tensor[] neighbours, float[] weights, "
    "Tensor(b!)? y_next, Tensor(c!)? distance) -> ()",
)


@_fused_mix.register_fake
@_fused_mix_delta.register_fake
def _(*args: Any) -> None:
    return None


# All agents of a simulation at once: row i of X is agent i's model, the graph is in CSR form.


def mix_rows(
    out: Tensor,
    y: Tensor,
    indptr: Tensor,
    indices: Tensor,
    self_weights: Tensor,
    weights: Tensor,
    acc: Tensor | None = None,
    alpha: float = 0.0,
) -> None:
    """out[i] = self_weights[i] y[i] + sum_k weights[k] y[indices[k]] - alpha acc[i], for every i.

    k runs over indptr[i]:indptr[i+1]. Each row is bit for bit what `fused_mix` gives. indptr and
    indices are int64, the weights float64, all on the CPU.
    """
    checks.rows("out", out, y, indptr, indices, weights, self_weights, acc)
    graph = (indptr, indices, self_weights, weights)
    _row_code_for(out.device).mix_rows(out, y, graph, acc, alpha)


def mix_rows_delta(
    x: Tensor,
    y: Tensor,
    indptr: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    distance: bool = False,
) -> Tensor | None:
    """x[i] += sum_k weights[k] (y[indices[k]] - y[i]) for every row i, k in indptr[i]:indptr[i+1].

    Each row is bit for bit what `fused_mix_delta` gives; with `distance`, so is each entry of the
    (n,) result.
    """
    checks.rows("x", x, y, indptr, indices, weights, None, None)
    d2 = torch.empty(x.shape[0], dtype=torch.float64, device=x.device) if distance else None
    _row_code_for(x.device).mix_rows_delta(x, y, (indptr, indices, weights), d2)
    return d2


def stream_copy(dst: Tensor, src: Tensor) -> None:
    """dst = src past the cache: the upper limit in the benchmark. Needs the native code."""
    checks.copy(dst, src)
    native.stream_copy(dst, src)
