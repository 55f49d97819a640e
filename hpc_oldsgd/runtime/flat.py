"""A module's trainable parameters and float buffers as views of one contiguous buffer x.

Optimizers, autograd and BatchNorm go on using their own tensors; mixing and MPI see one vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import UserError

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
        check_trainable(module)
        tensors = list(_mixed(module, buffers))
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
        for name, tensor in self._outside():
            _check_unshared(name, tensor, seen)
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
        """Names, shapes, type and layout: equal exactly on ranks whose models fit together."""
        parts = [_described(s.name, s.tensor, mixed=True) for s in self.slots]
        parts += [_described(name, tensor, mixed=False) for name, tensor in self._outside()]
        return " ".join(parts)

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
            if grad is not None and grad.layout is not torch.strided:
                raise UserError(
                    f"{slot.name} has a sparse gradient, which this algorithm cannot read: use "
                    "Embedding(sparse=False), or oldsgd in its delta form"
                )
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
            slot.tensor.grad = view
        return g

    def check_views(self) -> None:
        """The module still lives in x: `model.to(...)` or a new `p.data` would leave it behind."""
        inside = {id(slot.tensor) for slot in self.slots}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                raise UserError(
                    f"{name} is trained but not mixed: unfreeze it, or add it to the model, before "
                    "the Agent is made"
                )
        base, size = self.x.data_ptr(), self.x.element_size()
        for slot in self.slots:
            if slot.tensor.numel() and slot.tensor.data_ptr() != base + slot.offset * size:
                raise UserError(
                    f"{slot.name} was moved out of the agent's buffer: move or cast the model "
                    "before the Agent is made, and change weights in place"
                )

    def _outside(self) -> Iterator[tuple[str, Tensor]]:
        """What is frozen, integer or local."""
        inside = {id(s.tensor) for s in self.slots}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if id(tensor) not in inside:
                yield name, tensor

    def _check(self, name: str, tensor: Tensor, first: str, seen: dict[int, str]) -> None:
        hint = "" if isinstance(tensor, nn.Parameter) else ', or use buffers="local"'
        if tensor.dtype != self.dtype or tensor.device != self.device:
            raise UserError(
                f"{name} is {tensor.dtype} on {tensor.device}, {first} is {self.dtype} on "
                f"{self.device}: all must have one dtype and device{hint}"
            )
        if tensor.numel() and not _dense(tensor):
            raise UserError(f"{name} is an expanded or overlapping view: make it contiguous first")
        _check_unshared(name, tensor, seen)
        seen[tensor.data_ptr()] = name
        if not bool(torch.isfinite(tensor.detach()).all()):
            raise UserError(f"{name} holds NaN or infinity already: look at the model{hint}")


def _check_unshared(name: str, tensor: Tensor, seen: dict[int, str]) -> None:
    """In x each tensor has memory of its own: what shared it would drift apart."""
    if tensor.numel() and tensor.data_ptr() in seen:
        raise UserError(
            f"{name} and {seen[tensor.data_ptr()]} share memory but are two tensors: "
            "tie them as one Parameter"
        )


def check_trainable(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            "the model has no parameters that require a gradient: nothing to train or mix"
        )


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


def _described(name: str, tensor: Tensor, mixed: bool) -> str:
    text = f"{name}[{'x'.join(map(str, tensor.shape))}]:{tensor.dtype}".replace("torch.", "")
    if not mixed:
        return f"{text}:not_mixed"
    # In x a tensor lies as its strides say: channels_last on one rank only would be scrambled.
    return text if tensor.is_contiguous() else f"{text}:strides_{tensor.stride()}".replace(" ", "")


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
