"""The difference wire's native code, called as `narrow_reference` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import native
from .native import DTYPES, written


def encode(x: Tensor, z: Tensor, message: Tensor, bits: int) -> None:
    m = _rows(z, message, bits)
    m.x, m.x_stride = x.data_ptr(), x.stride(0)
    _run_rows(m, z)
    written(z, message)


def decode_add(z: Tensor, message: Tensor, bits: int) -> None:
    _run_rows(_rows(z, message, bits), z)
    written(z)


def mix_narrow(
    x: Tensor,
    z_self: Tensor,
    copies: Sequence[Tensor],
    messages: Sequence[Tensor],
    weights: Sequence[float],
    bits: int,
    next_message: Tensor | None,
    distance: Tensor | None,
) -> None:
    m = native.extension.Narrow()
    m.model, m.bits, m.n = DTYPES[x.dtype], bits, x.numel()
    m.x, m.z_self = x.data_ptr(), z_self.data_ptr()
    to, of = [z.data_ptr() for z in copies], [q.data_ptr() for q in messages]
    m.set_copies(to, of, weights)
    if next_message is not None:
        m.next = next_message.data_ptr()
    if distance is not None:
        m.distance = distance.data_ptr()
    if x.is_cuda:
        launched = native.extension.narrow_cuda
        native.launch(launched, m, x, [*to, *of], weights, distance is not None)
    else:
        native.extension.narrow(m, torch.get_num_threads())
    written(x, *copies, distance, next_message, None if next_message is None else z_self)


def _rows(z: Tensor, message: Tensor, bits: int) -> Any:
    m = native.extension.NarrowRows()
    m.model, m.bits = DTYPES[z.dtype], bits
    m.rows, m.d = z.shape
    m.z, m.z_stride = z.data_ptr(), z.stride(0)
    m.message, m.message_stride = message.data_ptr(), message.stride(0)
    return m


def _run_rows(m: Any, z: Tensor) -> None:
    if not z.is_cuda:
        native.extension.narrow_rows(m, torch.get_num_threads())
        return
    with torch.cuda.device(z.device):
        native.extension.narrow_rows_cuda(m, torch.cuda.current_stream(z.device).cuda_stream)
