"""The fused mixing op, in its two forms, as torch custom ops over the native code.

    gradient form   out = w_0 y_i + sum_j w_j y_j - alpha acc
    delta form      x  += sum_j w_j (y_j - y_i)

Each is one pass over memory, and each writes the next wire snapshot in that pass. The order is
fixed: self, the neighbours as given, the accumulator, every product rounded before it is added. So
the result is the same bit for bit on every instruction set, for every number of threads, in one
row or in many, and in the plain torch reference.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import checks, reference

__all__ = [
    "build_info",
    "fused_mix",
    "fused_mix_delta",
    "mix_rows",
    "mix_rows_delta",
    "native_available",
]

GRADIENT, DELTA = 0, 1
API = 3  # of the extension, see csrc/bindings.cpp
_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("HPC_OLDSGD_NATIVE") == "0":
        return None, "HPC_OLDSGD_NATIVE=0"
    try:
        module = importlib.import_module("hpc_oldsgd._native")
    except ImportError as error:
        return None, f"the extension did not load: {error}"
    if getattr(module, "API", 0) != API:
        return None, "the extension was built from other sources: reinstall the package"
    module.join_team(_openmp())
    return module, ""


def _openmp() -> int:
    """Where torch's threads are entered; 0 if torch has none that we can join."""
    try:
        library = ctypes.CDLL(torch._C.__file__)  # looks through the libraries it is linked with
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


_native: Any
_native, _why_not = _load()
_CUDA = bool(_native and _native.build_info()["cuda"])
_announced = threading.Event()


def native_available() -> bool:
    return _native is not None


def build_info() -> dict[str, object]:
    """Compiler, instruction set in use, CUDA architectures; or why the torch reference is used."""
    if _native is None:
        return {"native": False, "reason": _why_not, "cuda": False}
    return {"native": True, **_native.build_info()}


def _native_for(device: torch.device) -> bool:
    kind = device.type
    if _native is not None and (kind == "cpu" or (_CUDA and kind == "cuda")):
        return True
    if not _announced.is_set():
        _announced.set()
        from ..cli import launcher_rank

        if launcher_rank():  # one of many ranks speaks; the doctor looks at each
            return False
        why = _why_not or f"the extension was built without support for {kind} tensors"
        warnings.warn(
            f"hpc_oldsgd mixes with plain torch, correct but slower: {why}.",
            RuntimeWarning,
            stacklevel=4,
        )
    return False


def _written(*tensors: Tensor | None) -> None:
    """Torch did not see the native write; whoever compares `_version` must."""
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def _run(
    form: int,
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None,
    alpha: float,
    y_next: Tensor | None,
    zero_acc: bool,
    distance: Tensor | None,
) -> None:
    weights, alpha = checks.numbers(weights, alpha)
    addresses = checks.mix(
        "x" if form == DELTA else "out", x, y_self, neighbours, weights, acc, y_next, zero_acc
    )
    if x.is_meta:
        return
    if not _native_for(x.device):
        if form == GRADIENT:
            reference.mix(x, y_self, neighbours, weights, acc, alpha, y_next, zero_acc)
        else:
            reference.mix_delta(x, y_self, neighbours, weights, y_next, distance)
        return
    a_x, a_y, a_nbr, a_acc, a_next = addresses
    types = (checks.CODE[x.dtype], checks.CODE[y_self.dtype])
    args = (form, *types, x.numel(), a_x, a_y, a_nbr, weights, a_acc, alpha)
    flags = (zero_acc, a_next, 0 if distance is None else distance.data_ptr())
    if x.device.type == "cpu":
        _native.mix(*args, *flags, torch.get_num_threads())
    else:
        _run_cuda(x, args, flags)
    _written(x, y_next, acc if zero_acc else None, distance)


def _run_cuda(x: Tensor, args: tuple[Any, ...], flags: tuple[Any, ...]) -> None:
    """One launch on the caller's stream; nothing here waits for the device."""
    addresses, weights = args[6], args[7]
    table = scratch = None
    with torch.cuda.device(x.device):
        if len(addresses) > _native.MAX_FIXED_DEGREE:
            pinned = _address_table(addresses, weights).pin_memory()
            table = pinned.to(x.device, non_blocking=True)
        if flags[2]:
            scratch = torch.zeros(_native.CUDA_SCRATCH, dtype=torch.float64, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        extra = (0 if t is None else t.data_ptr() for t in (table, scratch))
        _native.mix_cuda(*args, *flags, stream, *extra)


def _address_table(addresses: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Neighbours past the fixed degree, as mix.h wants them: addresses, then weights as doubles."""
    doubles = torch.tensor(weights, dtype=torch.float64)
    return torch.cat([torch.tensor(addresses, dtype=torch.int64), doubles.view(torch.int64)])


# The ops as torch sees them: traced by torch.compile and torch.export, faked without data. Schemas
# are written out, since what torch infers them from differs between its versions.


@torch.library.custom_op(
    "hpc_oldsgd::fused_mix",
    mutates_args=("out", "acc", "y_next"),
    schema="(Tensor(a!) out, Tensor y_self, Tensor[] neighbours, float[] weights, "
    "Tensor(b!)? acc, float alpha, Tensor(c!)? y_next, bool zero_acc) -> ()",
)
def _fused_mix(
    out: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None,
    alpha: float,
    y_next: Tensor | None,
    zero_acc: bool,
) -> None:
    _run(GRADIENT, out, y_self, neighbours, weights, acc, alpha, y_next, zero_acc, None)


@torch.library.custom_op(
    "hpc_oldsgd::fused_mix_delta",
    mutates_args=("x", "y_next", "distance"),
    schema="(Tensor(a!) x, Tensor y_self, Tensor[] neighbours, float[] weights, "
    "Tensor(b!)? y_next, Tensor(c!)? distance) -> ()",
)
def _fused_mix_delta(
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    y_next: Tensor | None,
    distance: Tensor | None,
) -> None:
    _run(DELTA, x, y_self, neighbours, weights, None, 0.0, y_next, False, distance)


@_fused_mix.register_fake
def _(*args: Any) -> None:
    return None


@_fused_mix_delta.register_fake
def _(*args: Any) -> None:
    return None


def _traced(x: Tensor, *others: Tensor | None) -> bool:
    """For torch's dispatcher: a graph is being made, or there may be no memory behind a tensor."""
    if torch.compiler.is_compiling():
        return True
    for t in (x, *others):
        if type(t) not in _PLAIN:
            if not isinstance(t, Tensor):
                raise UserError(f"fused mixing takes torch tensors, not {type(t).__name__}.")
            return True
    return False


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
    if _traced(out, y_self, acc, y_next, *neighbours):
        _fused_mix(out, y_self, neighbours, weights, acc, alpha, y_next, zero_acc)
    else:
        _run(GRADIENT, out, y_self, neighbours, weights, acc, alpha, y_next, zero_acc, None)


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
    if _traced(x, y_self, y_next, *neighbours):
        _fused_mix_delta(x, y_self, neighbours, weights, y_next, d2)
    else:
        _run(DELTA, x, y_self, neighbours, weights, None, 0.0, y_next, False, d2)
    return d2


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
    if out.device.type != "cpu" or not _native_for(out.device):
        checks.graph(out.shape[0], indptr, indices)
        graph = [t.to(out.device) for t in (indptr, indices, self_weights, weights)]
        reference.mix_rows(out, y, graph, acc, alpha)
        return
    _rows(GRADIENT, out, y, indptr, indices, weights, self_weights, acc, alpha, None)


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
    if x.device.type != "cpu" or not _native_for(x.device):
        checks.graph(x.shape[0], indptr, indices)
        graph = [t.to(x.device) for t in (indptr, indices, weights)]
        reference.mix_rows_delta(x, y, graph, d2)
    else:
        _rows(DELTA, x, y, indptr, indices, weights, None, None, 0.0, d2)
    return d2


def _rows(
    form: int,
    x: Tensor,
    y: Tensor,
    indptr: Tensor,
    indices: Tensor,
    weights: Tensor,
    self_weights: Tensor | None,
    acc: Tensor | None,
    alpha: float,
    distance: Tensor | None,
) -> None:
    _native.mix_rows(
        *(form, checks.CODE[x.dtype], checks.CODE[y.dtype], *x.shape, indices.numel()),
        *(x.data_ptr(), y.data_ptr()),
        *(indptr.data_ptr(), indices.data_ptr(), weights.data_ptr()),
        *(0 if t is None else t.data_ptr() for t in (self_weights, acc)),
        alpha,
        0 if distance is None else distance.data_ptr(),
        torch.get_num_threads(),
    )
    _written(x, distance)


def stream_copy(dst: Tensor, src: Tensor) -> None:
    """dst = src past the cache: the yardstick of the benchmark. Needs the native code."""
    checks.copy(dst, src)
    size = dst.numel() * dst.element_size()
    _native.stream_copy(dst.data_ptr(), src.data_ptr(), size, torch.get_num_threads())
    _written(dst)
