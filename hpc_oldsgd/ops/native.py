"""The C++ extension: loaded here and nowhere else, and called as `reference` is.

The functions get checked arguments and write through raw addresses.
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

from ..launch.launcher import launcher_rank
from ..torch_private import file_of_torch

API = 7  # raise it with every change to a signature in csrc/*bindings.cpp; CMake builds it in


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("HPC_OLDSGD_NATIVE") == "0":
        return None, "HPC_OLDSGD_NATIVE=0"
    try:
        module = importlib.import_module("hpc_oldsgd._native")
    except ImportError as error:
        return None, f"the extension did not load: {error}"
    if getattr(module, "API", 0) != API:
        return None, "the extension was built from other sources: reinstall the package"
    module.join_team(openmp_entry())
    return module, ""


def openmp_entry() -> int:
    """The function that starts torch's threads; 0 if there is none, and one thread does all."""
    try:
        library = ctypes.CDLL(file_of_torch())  # looks through the libraries it is linked with
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


extension: Any
extension, why_not = _load()
DTYPES: dict[torch.dtype, Any] = {}  # to the extension's enum
if extension is not None:
    DTYPES[torch.float64] = extension.Dtype.f64
    DTYPES[torch.float32] = extension.Dtype.f32
    DTYPES[torch.bfloat16] = extension.Dtype.bf16
    DTYPES[torch.float16] = extension.Dtype.f16
_CUDA = bool(extension and extension.build_info()["cuda"])
_announced = threading.Event()


def runs_on(device: torch.device) -> bool:
    """If not, one rank of the job warns about it, once; the doctor checks every rank."""
    kind = device.type
    if extension is not None and (kind == "cpu" or (_CUDA and kind == "cuda")):
        return True
    if not _announced.is_set():
        _announced.set()
        if launcher_rank() == 0:
            why = why_not or f"the extension was built without support for {kind} tensors"
            warnings.warn(
                f"hpc_oldsgd mixes with plain torch, correct but slower: {why}.",
                RuntimeWarning,
                stacklevel=5,
            )
    return False


def mix(
    out: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None,
    alpha: float,
    y_next: Tensor | None,
    zero_acc: bool,
) -> None:
    m = _arguments("gradient", out, y_self, y_next)
    m.alpha = alpha
    if acc is not None:
        m.acc, m.zero_acc = acc.data_ptr(), zero_acc
    _run(m, out, neighbours, weights)
    written(out, y_next, acc if zero_acc else None)


def mix_delta(
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    y_next: Tensor | None,
    distance: Tensor | None,
) -> None:
    m = _arguments("delta", x, y_self, y_next)
    if distance is not None:
        m.distance = distance.data_ptr()
    _run(m, x, neighbours, weights, distance is not None)
    written(x, y_next, distance)


def _arguments(form: str, x: Tensor, y_self: Tensor, y_next: Tensor | None) -> Any:
    m = extension.Mix()
    m.form = getattr(extension.Form, form)
    m.model, m.wire, m.n = DTYPES[x.dtype], DTYPES[y_self.dtype], x.numel()
    m.out, m.y_self = x.data_ptr(), y_self.data_ptr()
    if y_next is not None:
        m.y_next = y_next.data_ptr()
    return m


def _run(
    m: Any,
    x: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    distance: bool = False,
) -> None:
    addresses = [y.data_ptr() for y in neighbours]
    m.set_neighbours(addresses, weights)
    if x.is_cuda:
        launch(extension.mix_cuda, m, x, addresses, weights, distance)
    else:
        extension.mix(m, torch.get_num_threads())


def launch(
    function: Any,
    m: Any,
    x: Tensor,
    addresses: Sequence[int],
    weights: Sequence[float],
    distance: bool,
) -> None:
    """One launch on the caller's stream; nothing here waits for the device."""
    with torch.cuda.device(x.device):
        table, scratch = None, None
        if len(weights) - 1 > extension.MAX_FIXED_DEGREE:
            pinned = address_table(addresses, weights).pin_memory()
            table = pinned.to(x.device, non_blocking=True)
        if distance:
            scratch = torch.zeros(extension.CUDA_SCRATCH, dtype=torch.float64, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        extra = (0 if t is None else t.data_ptr() for t in (table, scratch))
        function(m, stream, *extra)


def address_table(addresses: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Past the fixed degree, as mix.h and narrow.h want it: addresses, then weights as doubles."""
    doubles = torch.tensor(weights, dtype=torch.float64)
    return torch.cat([torch.tensor(addresses, dtype=torch.int64), doubles.view(torch.int64)])


def mix_rows(
    out: Tensor, y: Tensor, graph: Sequence[Tensor], acc: Tensor | None, alpha: float
) -> None:
    indptr, indices, self_weights, weights = graph
    m = _row_arguments("gradient", out, y, indptr, indices, weights)
    m.self_weights, m.alpha = self_weights.data_ptr(), alpha
    if acc is not None:
        m.acc = acc.data_ptr()
    extension.mix_rows(m, torch.get_num_threads())
    written(out)


def mix_rows_delta(x: Tensor, y: Tensor, graph: Sequence[Tensor], distance: Tensor | None) -> None:
    m = _row_arguments("delta", x, y, *graph)
    if distance is not None:
        m.distance = distance.data_ptr()
    extension.mix_rows(m, torch.get_num_threads())
    written(x, distance)


def _row_arguments(
    form: str, x: Tensor, y: Tensor, indptr: Tensor, indices: Tensor, weights: Tensor
) -> Any:
    m = extension.MixRows()
    m.form = getattr(extension.Form, form)
    m.model, m.wire = DTYPES[x.dtype], DTYPES[y.dtype]
    m.rows, m.d = x.shape
    m.edges, m.stride = indices.numel(), x.stride(0)
    m.out, m.y = x.data_ptr(), y.data_ptr()
    m.indptr, m.indices, m.weights = indptr.data_ptr(), indices.data_ptr(), weights.data_ptr()
    return m


def stream_copy(dst: Tensor, src: Tensor) -> None:
    size = dst.numel() * dst.element_size()
    extension.stream_copy(dst.data_ptr(), src.data_ptr(), size, torch.get_num_threads())
    written(dst)


def written(*tensors: Tensor | None) -> None:
    """Torch did not see the write: raise `_version`, which others compare."""
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)
