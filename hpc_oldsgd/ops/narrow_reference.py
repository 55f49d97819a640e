"""The difference wire in plain torch: what the native code matches bit for bit, and the fallback.

A message holds Q(x - z), the codes of all numbers and then one scale a block:

    scale = (largest |x - z| of the block) / top,   code = round((x - z) / scale) in -top..top

top is 127 for 8 bits and 7 for 4. The scale is rounded to bf16 first; the largest code is top all
the same. An 8-bit code is a byte; two 4-bit codes share one, the first in its low half. Everything
is computed in fp32 (fp64 for a fp64 model), one rounded operation after the other, so that sender
and receiver get the same z. A block with an inf or a NaN has the scale inf and decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .reference import accumulator

BLOCK = 64
"""Numbers that share a scale."""
SCALE = torch.bfloat16
TOP = {8: 127.0, 4: 7.0}
SMALLEST = 2.0**-126
"""A smaller scale is 0: 1 / scale stays finite, and nothing depends on flushed subnormals."""


def code_bytes(d: int, bits: int) -> int:
    """Of d numbers, up to where the scales begin: a multiple of 4."""
    return (d * bits + 31) // 32 * 4


def message_bytes(d: int, bits: int) -> int:
    return code_bytes(d, bits) + -(-d // BLOCK) * SCALE.itemsize


def encode(x: Tensor, z: Tensor, message: Tensor, bits: int) -> None:
    """Rows of x, z and message are encoded each on its own."""
    a = accumulator(x.dtype)
    with torch.no_grad():
        n, d = x.shape
        blocks = -(-d // BLOCK)
        delta = torch.zeros(n, blocks * BLOCK, dtype=a, device=x.device)
        delta[:, :d] = x.to(a) - z.to(a)
        delta = delta.view(n, blocks, BLOCK)
        # Not `/ TOP[bits]`, which torch turns into a product on a GPU.
        top = torch.full((), TOP[bits], dtype=a, device=x.device)
        scale = (delta.abs().amax(dim=2) / top).float().to(SCALE) if d else delta.new_empty(n, 0)
        scale = torch.where(scale < SMALLEST, torch.zeros_like(scale), scale)
        scale = torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.inf))
        usable = ((scale > 0) & scale.isfinite()).unsqueeze(2)
        inverse = torch.ones((), dtype=a, device=x.device) / scale.to(a).unsqueeze(2)
        code = torch.where(usable, (delta * inverse).round(), torch.zeros_like(delta))
        code = code.to(torch.int8).view(n, -1)[:, :d]
        message.copy_(torch.cat([_pack(code, bits), _bytes(scale)], dim=1))
        _add(z, code, scale)


def decode_add(z: Tensor, message: Tensor, bits: int) -> None:
    with torch.no_grad():
        n, d = z.shape
        size = code_bytes(d, bits)
        packed = message[:, :size].contiguous().view(torch.int8)
        code = packed if bits == 8 else torch.stack([packed << 4 >> 4, packed >> 4], dim=2)
        scale = message[:, size:].clone(memory_format=torch.contiguous_format)
        _add(z, code.reshape(n, -1)[:, :d], scale.view(SCALE) if d else scale)


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
    for z, message in zip(copies, messages, strict=True):
        decode_add(z.view(1, -1), message.view(1, -1), bits)
    reference.mix_delta(x, z_self, copies, weights, None, distance)
    if next_message is not None:
        encode(x.view(1, -1), z_self.view(1, -1), next_message.view(1, -1), bits)


def _pack(code: Tensor, bits: int) -> Tensor:
    n, d = code.shape
    padded = code.new_zeros(n, code_bytes(d, bits) * 8 // bits)
    padded[:, :d] = code
    if bits == 4:
        padded = (padded[:, 0::2] & 15) | (padded[:, 1::2] << 4)
    return padded.view(torch.uint8)


def _bytes(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.uint8) if scale.numel() else scale.to(torch.uint8)


def _add(z: Tensor, code: Tensor, scale: Tensor) -> None:
    a, d = accumulator(z.dtype), z.shape[1]
    if d:
        step = scale.to(a).repeat_interleave(BLOCK, dim=1)[:, :d]
        z.copy_(z.to(a) + code.to(a) * step)
