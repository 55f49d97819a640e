"""A module's trainable parameters and float buffers as views of one contiguous buffer x.

Optimizers, autograd and BatchNorm go on using their own tensors; mixing and MPI see one vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .errors import UserError

ALIGN_BYTES = 64  # each tensor starts on a cache line, as torch's own allocator gives it
Buffers = Literal["mix", "local"]


@dataclass(frozen=True)
class Slot:
    """Where one tensor lives in x."""

    name: str
    tensor: Tensor
    offset: int

    def view(self, x: Tensor) -> Tensor:
        # as_strided keeps channels_last and other dense layouts.
        return x.as_strided(
            self.tensor.size(), self.tensor.stride(), x.storage_offset() + self.offset
        )


class Flat:
    """The layout of a module in x, and the module's tensors made views of it."""

    def __init__(
        self,
        module: nn.Module,
        buffers: Buffers = "mix",
        x: Tensor | None = None,
        g: Tensor | None = None,
    ) -> None:
        """x and g, if given, are where the values and the flat gradient live."""
        self.module = module
        tensors = list(_mixed(module, buffers))
        if not any(isinstance(t, nn.Parameter) for _, t in tensors):
            raise UserError(
                "the model has no parameters that require a gradient: nothing to train or mix"
            )
        first = tensors[0][1]
        self.dtype, self.device = first.dtype, first.device
        align = max(1, ALIGN_BYTES // first.element_size())
        self.slots: list[Slot] = []
        self.d = 0
        seen: dict[int, str] = {}
        for name, tensor in tensors:
            self._check(name, tensor, tensors[0][0], seen)
            self.slots.append(Slot(name, tensor, self.d))
            self.d += -(-tensor.numel() // align) * align
        self.x = torch.zeros(self.d, dtype=self.dtype, device=self.device) if x is None else x
        assert self.x.shape == (self.d,)
        for slot in self.slots:
            view = slot.view(self.x)
            view.copy_(slot.tensor.detach())
            slot.tensor.data = view
        self._gradient = g

    @property
    def parameters(self) -> list[Slot]:
        return [s for s in self.slots if isinstance(s.tensor, nn.Parameter)]

    def signature(self) -> str:
        """Names, shapes and type: equal on two ranks exactly if their models fit together."""
        inside = {id(s.tensor) for s in self.slots}
        named = [(s.name, s.tensor) for s in self.slots]
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if id(tensor) not in inside:  # frozen, integer or local
                named.append((name, tensor))
        parts = [f"{name}[{'x'.join(map(str, t.shape))}]:{t.dtype}" for name, t in named]
        return " ".join(parts).replace("torch.", "")

    def version(self) -> int:
        """Grows with every change in place, be it of x or through the module's own tensors."""
        return self.x._version + sum(s.tensor._version for s in self.slots)

    def gradient(self) -> Tensor:
        """The gradients as one vector g laid out like x; every p.grad becomes a view of it.

        Free when p.grad are those views already (zero_grad(set_to_none=False)), else one copy.
        """
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.x)
        g = self._gradient
        for slot in self.parameters:
            view = slot.view(g)
            grad = slot.tensor.grad
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
            slot.tensor.grad = view
        return g

    def check_views(self) -> None:
        """The module still lives in x: `model.to(...)` or a new `p.data` would leave it behind."""
        base, size = self.x.data_ptr(), self.x.element_size()
        for slot in self.slots:
            if slot.tensor.numel() and slot.tensor.data_ptr() != base + slot.offset * size:
                raise UserError(
                    f"{slot.name} was moved out of the agent's buffer: move or cast the model "
                    "before the Agent is made, and change weights in place"
                )

    def _check(self, name: str, tensor: Tensor, first: str, seen: dict[int, str]) -> None:
        if tensor.dtype != self.dtype or tensor.device != self.device:
            hint = "" if isinstance(tensor, nn.Parameter) else ', or use buffers="local"'
            raise UserError(
                f"{name} is {tensor.dtype} on {tensor.device}, {first} is {self.dtype} on "
                f"{self.device}: all must have one dtype and device{hint}"
            )
        if tensor.numel() and not _dense(tensor):
            raise UserError(f"{name} is an expanded or overlapping view: make it contiguous first")
        if tensor.numel() and tensor.data_ptr() in seen:
            raise UserError(
                f"{name} and {seen[tensor.data_ptr()]} share memory but are two tensors: "
                "tie them as one Parameter"
            )
        seen[tensor.data_ptr()] = name


def _mixed(module: nn.Module, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
    """Trainable parameters, shared ones once, then float buffers; frozen ones never change."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
    if buffers == "mix":
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                yield name, buffer
    elif buffers != "local":
        raise UserError(f'buffers must be "mix" or "local", not {buffers!r}')


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
