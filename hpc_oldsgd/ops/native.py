"""The C++ extension: loaded here and nowhere else, and called as `reference` is.

The functions get checked arguments and write through raw addresses.
"""

from __future__ import annotations

import ctypes
import functools
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
        # It looks through the libraries that this one, or else this program, is linked with.
        library = ctypes.CDLL(file_of_torch() or None)
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
    why = why_not_on(device)
    if not why:
        return True
    if not _announced.is_set():
        _announced.set()
        if launcher_rank() == 0:
            warnings.warn(
                f"hpc_oldsgd mixes with plain torch, correct but slower: {why}.",
                RuntimeWarning,
                stacklevel=5,
            )
    return False


def why_not_on(device: torch.device) -> str:
    """Why plain torch mixes there; empty if the extension does."""
    if extension is None:
        return why_not or "there is none"
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or not _CUDA:
        return f"the extension was built without support for {device.type} tensors"
    return _why_not_on_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _why_not_on_gpu(index: int) -> str:
    with torch.cuda.device(index):
        built = extension.build_info()["cuda_archs"]
        lacks = no_code_for(torch.cuda.get_device_capability(), built)
        return lacks or str(extension.cuda_refusal())


def no_code_for(capability: tuple[int, int], built: str) -> str:
    """A reason if a build for `built`, such as "75-real 90", has no code for a GPU.

    Code for 8.0 also runs on 8.6 and 8.9, not on 9.0. The newest is there as PTX too, from which
    the driver makes code for every later GPU when the kernel is first used.
    """
    real = [int(arch.removesuffix("-real")) for arch in built.split()]
    own = 10 * capability[0] + capability[1]
    same_major = any(arch // 10 == capability[0] and arch <= own for arch in real)
    if same_major or own >= max(real, default=own):
        return ""
    has = ", ".join(f"{arch // 10}.{arch % 10}" for arch in real)
    return (
        f"the extension has code for GPUs of compute capability {has} and later, and this one has "
        f"{capability[0]}.{capability[1]}"
    )


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
        stream = torch.cuda.current_stream(x.device).cuda_stream
        captured = torch.cuda.is_current_stream_capturing()
        if len(weights) - 1 > extension.MAX_FIXED_DEGREE:
            check_captured(captured, len(weights) - 1)
            pinned = address_table(addresses, weights).pin_memory()
            table = pinned.to(x.device, non_blocking=True)
        if distance:
            # A graph's memory is its own: nobody else may use it.
            make = _new_scratch if captured else _scratch
            scratch = make(x.device, stream)
        extra = (0 if t is None else t.data_ptr() for t in (table, scratch))
        function(m, stream, *extra)


def check_captured(captured: bool, degree: int) -> None:
    if captured:
        raise UserError(
            f"a CUDA graph cannot hold a mix of {degree} neighbours, whose addresses are copied to "
            f"the GPU at each call: mix outside the graph, or at most {extension.MAX_FIXED_DEGREE}"
        )


def _new_scratch(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(extension.CUDA_SCRATCH, dtype=torch.float64, device=device)


_scratch = functools.cache(_new_scratch)
"""Of one stream, whose kernels come one after the other. Each leaves it zero."""


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
