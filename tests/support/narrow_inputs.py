"""Inputs of the difference wire over all its types."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_oldsgd import ops

from .mix_inputs import buffer


@dataclass
class Narrow:
    """Arguments of fused_mix_narrow. Blocks differ in size, and one of them is all zeros."""

    x: Tensor
    z: Tensor
    copies: list[Tensor]
    messages: list[Tensor]
    weights: list[float]
    bits: int
    next: Tensor

    def copy(self) -> Narrow:
        copies = [z.clone() for z in self.copies]
        x, z, q = self.x.clone(), self.z.clone(), self.next.clone()
        return Narrow(x, z, copies, self.messages, self.weights, self.bits, q)

    def moved(self, offset: int) -> Narrow:
        """In memory that starts `offset` elements past a 64-byte boundary; messages in bytes."""

        def at(t: Tensor) -> Tensor:
            return buffer(t.numel(), t.dtype, t, offset)

        messages = [at(q) for q in self.messages]
        x, z, copies = at(self.x), at(self.z), [at(c) for c in self.copies]
        return Narrow(x, z, copies, messages, self.weights, self.bits, at(self.next))

    def tensors(self) -> list[Tensor]:
        return [self.x, self.z, *self.copies, self.next]


def case(model: torch.dtype, bits: int, n: int, degree: int, *, seed: int = 0) -> Narrow:
    g = torch.Generator().manual_seed(1000 * seed + 10 * degree + n)

    def values(scale: float = 1.0) -> Tensor:
        blocks = 10.0 ** (torch.arange(n) // 64 % 4 - 2)
        return (torch.randn(n, generator=g, dtype=torch.float64) * blocks * scale).to(model)

    def message() -> Tensor:
        q, z = torch.empty(ops.message_bytes(n, bits), dtype=torch.uint8), torch.zeros_like(x)
        ops.encode(values(0.1), z, q, bits)
        return q

    x = values()
    z = x + values(0.01)
    z[64:128] = x[64:128]
    copies = [values() for _ in range(degree)]
    messages = [message() for _ in range(degree)]
    weights = torch.rand(degree + 1, generator=g, dtype=torch.float64).tolist()
    filled = torch.full((ops.message_bytes(n, bits),), 0xAB, dtype=torch.uint8)
    return Narrow(x, z, copies, messages, weights, bits, filled)
