"""`bench mix` over the difference wire: messages of 8 or 4 bits, and what torch can compose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.narrow_reference import BLOCK, SCALE, TOP, code_bytes

Call = tuple[str, str, int, Callable[[], Any]]
"""Name, form, the bytes that must move, what is timed."""


@dataclass
class Message:
    """A message, and its parts once more, each in memory of its own as torch.compile wants them."""

    whole: Tensor
    codes: Tensor  # int8, one or two codes each
    scales: Tensor  # bf16, a column

    @classmethod
    def of(cls, difference: Tensor, bits: int) -> Message:
        n = difference.numel()
        whole = torch.zeros(ops.message_bytes(n, bits), dtype=torch.uint8)
        ops.encode(difference, torch.zeros_like(difference), whole, bits)
        return cls(whole, *parts(whole, n, bits))


def parts(message: Tensor, n: int, bits: int) -> tuple[Tensor, Tensor]:
    codes = message[: (n * bits + 7) // 8].clone().view(torch.int8)
    return codes, message[code_bytes(n, bits) :].clone().view(SCALE).unsqueeze(1)


class NarrowBuffers:
    """The buffers all candidates share, and the candidates."""

    def __init__(self, model: torch.dtype, bits: int, degree: int, n: int) -> None:
        self.bits, self.degree = bits, degree
        self.w = [1.0 / (degree + 1)] * (degree + 1)
        self.x, self.z = torch.randn(n).to(model), torch.randn(n).to(model)
        self.copies = [torch.randn(n).to(model) for _ in range(degree)]
        self.messages = [Message.of(torch.randn(n).to(model), bits) for _ in range(degree)]
        self.next = Message.of(torch.zeros_like(self.x), bits)
        self.spare = torch.zeros(-(-n // BLOCK) * BLOCK, dtype=model)
        self.models = n * model.itemsize
        self.out = torch.empty_like(self.x)

    def calls(self, compile: bool) -> list[Call]:
        x, z, near, w, bits = self.x, self.z, self.copies, self.w, self.bits
        q, messages, following = self.messages, [m.whole for m in self.messages], self.next.whole
        model, size = self.models, self.next.whole.numel()
        bytes_of = {
            "round": 4 * model + self.degree * (2 * model + size) + size,
            "mix": 3 * model + self.degree * (2 * model + size),
            "encode": 3 * model + size,
        }
        mix = partial(ops.fused_mix_narrow, x, z, near, messages, w, bits)
        found: list[tuple[str, str, Callable[[], Any]]] = [
            ("ours", "round", partial(mix, next_message=following)),
            ("ours", "mix", mix),
            ("ours", "encode", partial(ops.encode, x, z, following, bits)),
        ]
        ways: list[tuple[str, Callable[[Any], Any]]] = [("torch in-place", lambda f: f)]
        if compile:
            ways.append(("torch.compile", torch.compile))
        for name, way in ways:
            whole, mixed, encoded = way(chain_round), way(chain_mix), way(chain_encode)
            lists = ([m.codes for m in q], [m.scales for m in q], w, bits, self.spare)
            to = (self.next.codes, self.next.scales)
            found += [
                (name, "round", partial(whole, x, z, near, *lists, *to)),
                (name, "mix", partial(mixed, x, z, near, *lists)),
                (name, "encode", partial(encoded, x, z, *to, bits, self.spare)),
            ]
        return [(name, form, bytes_of[form], call) for name, form, call in found]


def chain_round(
    x: Tensor,
    z: Tensor,
    near: list[Tensor],
    codes: list[Tensor],
    scales: list[Tensor],
    w: list[float],
    bits: int,
    spare: Tensor,
    next_codes: Tensor,
    next_scales: Tensor,
) -> None:
    chain_mix(x, z, near, codes, scales, w, bits, spare)
    chain_encode(x, z, next_codes, next_scales, bits, spare)


def chain_mix(
    x: Tensor,
    z: Tensor,
    near: list[Tensor],
    codes: list[Tensor],
    scales: list[Tensor],
    w: list[float],
    bits: int,
    spare: Tensor,
) -> None:
    x.sub_(z, alpha=sum(w[1:]))
    for w_j, z_j, code, scale in zip(w[1:], near, codes, scales, strict=True):
        numbers = spare[: z.numel()]
        if bits == 8:
            numbers.copy_(code)
        else:
            numbers[0::2] = code << 4 >> 4
            numbers[1::2] = (code >> 4)[: numbers.numel() // 2]
        spare.view(-1, BLOCK).mul_(scale)
        z_j.add_(numbers)
        x.add_(z_j, alpha=w_j)


def chain_encode(
    x: Tensor, z: Tensor, codes: Tensor, scales: Tensor, bits: int, spare: Tensor
) -> None:
    n = x.numel()
    torch.sub(x, z, out=spare[:n])
    blocks = spare.view(-1, BLOCK)
    scales.copy_(blocks.abs().amax(dim=1, keepdim=True) / TOP[bits])
    scale = scales.to(x.dtype)
    # 1e-30 is 0 in fp16, and 0 / 0 would leave a NaN in z, which `ours` then codes with care.
    blocks.div_(scale.clamp(min=max(1e-30, torch.finfo(x.dtype).tiny))).round_()
    if bits == 8:
        codes.copy_(spare[:n])
    else:
        both = spare.to(torch.int8)
        torch.bitwise_or(both[0:n:2] & 15, (both[1 : n + n % 2 : 2] << 4), out=codes)
    blocks.mul_(scale)
    z.add_(spare[:n])
