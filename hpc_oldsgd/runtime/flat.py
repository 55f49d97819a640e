"""A module's trainable parameters and float buffers as views of one contiguous buffer x.

Optimizers, autograd and BatchNorm go on using their own tensors; mixing and MPI see one vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..torch_private import held, hooks, is_spectral_norm, version

ALIGN_BYTES = 64  # each tensor starts on a cache line, as torch's own allocator gives it
Buffers = Literal["mix", "local"]


@dataclass(frozen=True)
class Slot:
    """Where one tensor lives in x."""

    name: str
    tensor: Tensor
    offset: int
    held: Any
    """Where its module holds it, by name."""
    key: str
    """Its name there."""

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
        dtype: torch.dtype | None = None,
    ) -> None:
        """x and g, if given, are where the values and the flat gradient live.

        With a dtype, only tensors of that type are taken; without, all must have one type.
        """
        self.module = module
        check_trainable(module)
        self.power_vectors = power_vectors(module)
        tensors = [(k, t) for k, t in _mixed(module, buffers) if id(t) not in self.power_vectors]
        tensors = [(k, t) for k, t in tensors if dtype in (None, t.dtype)]
        first = tensors[0][1]
        self.dtype, self.device = first.dtype, first.device
        align = max(1, ALIGN_BYTES // first.element_size())
        self.slots: list[Slot] = []
        self.d = 0
        seen: dict[int, str] = {}
        homes = _homes(module)
        for name, tensor in tensors:
            self._check(name, tensor, tensors[0][0], seen)
            self.slots.append(Slot(name, tensor, self.d, *homes[id(tensor)]))
            self.d += -(-tensor.numel() // align) * align
        for name, tensor in self.outside():
            _check_unshared(name, tensor, seen)
        self.x = torch.zeros(self.d, dtype=self.dtype, device=self.device) if x is None else x
        assert self.x.shape == (self.d,)
        for slot in self.slots:
            view = slot.view(self.x)
            view.copy_(slot.tensor.detach())
            slot.tensor.data = view
        self._gradient = g
        self._parameters = self.parameters
        self._buffers = self.slots[len(self._parameters) :]

    @property
    def parameters(self) -> list[Slot]:
        return [s for s in self.slots if isinstance(s.tensor, nn.Parameter)]

    def signature(self) -> str:
        """Names, shapes, type and layout: equal exactly on ranks whose models fit together."""
        parts = [_described(s.name, s.tensor, mixed=True) for s in self.slots]
        parts += [_described(name, tensor, mixed=False) for name, tensor in self.outside()]
        return " ".join(parts)

    def checksum(self) -> str:
        """Of all values, in x and outside: equal where the models are. One pass."""
        tensors = [self.x, *(tensor for _, tensor in self.outside())]
        return " ".join(str(int(_as_integers(t).sum(dtype=torch.int64))) for t in tensors)

    def version(self) -> int:
        """Grows with every change in place, be it of x or through the module's own tensors."""
        return version(self.x) + sum(version(s.tensor) for s in self.slots)

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

    @torch.no_grad()
    def adopt(self) -> bool:
        """Take back the buffers that a forward pass has replaced by new tensors; True if any.

        `self.center = 0.9 * self.center + ...` leaves the old tensor in x, and a new one outside.
        """
        changed = False
        for slot in self._buffers:
            new = slot.held.get(slot.key)
            if new is slot.tensor:
                continue
            if new is None or not _alike(new, slot.tensor):
                raise UserError(
                    f"{slot.name} was replaced by a tensor of another shape, type or device: keep "
                    'them as they were when the Agent was made, or use buffers="local"'
                )
            slot.tensor.copy_(new)
            slot.held[slot.key] = slot.tensor
            changed = True
        return changed

    def check_parameters(self) -> None:
        """Every parameter of x is still the module's, in its place. Some 0.2 us a parameter."""
        for slot in self._parameters:
            if slot.held.get(slot.key) is not slot.tensor:
                raise UserError(
                    f"{slot.name} was replaced by another tensor after the Agent was made: change "
                    "weights in place, for instance by load_state_dict without assign=True"
                )
        self._check_in_place(self._parameters)

    def _check_in_place(self, slots: list[Slot]) -> None:
        base, size = self.x.data_ptr(), self.x.element_size()
        for slot in slots:
            if slot.tensor.data_ptr() != base + slot.offset * size and slot.tensor.numel():
                raise UserError(
                    f"{slot.name} was moved out of the agent's buffer: move or cast the model "
                    "before the Agent is made, and change weights in place"
                )

    def check_views(self, also: Sequence[Slot] = ()) -> None:
        """The module still lives in x, and trains nothing outside of it and `also`."""
        self.check_parameters()
        self._check_in_place(self._buffers)
        inside = {id(slot.tensor) for slot in (*self.slots, *also)}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                raise UserError(
                    f"{name} is trained but not mixed: it was unfrozen or added after the Agent "
                    "was made. Add it to the optimizer and call agent.rebuild()"
                )

    def outside(self) -> Iterator[tuple[str, Tensor]]:
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
                f"{self.device}: all must have one dtype and device, for instance by "
                f"model.to({self.dtype}) and autocast{hint}"
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


def mixed_types(module: nn.Module, buffers: Buffers) -> list[torch.dtype]:
    """The types of what is mixed, that of the first tensor first."""
    check_trainable(module)
    apart = power_vectors(module)
    return list(dict.fromkeys(t.dtype for _, t in _mixed(module, buffers) if id(t) not in apart))


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


def power_vectors(module: nn.Module) -> set[int]:
    """Ids of spectral norm's u and v. They belong to one rank's weights: an average of unit vectors
    is none, and two ranks' may point in opposite directions."""
    from torch.nn.utils.spectral_norm import SpectralNorm

    found: set[int] = set()
    for part in module.modules():
        names = [h.name for h in hooks(part) if isinstance(h, SpectralNorm)]
        keys = [f"{name}{end}" for name in names for end in ("_u", "_v")]
        if is_spectral_norm(part):
            keys += ["_u", "_v"]
        found |= {id(buffer) for key, buffer in part.named_buffers(recurse=False) if key in keys}
    return found


def _homes(module: nn.Module) -> dict[int, tuple[Any, str]]:
    """By a tensor's id: where its module holds it, and its name there."""
    homes: dict[int, tuple[Any, str]] = {}
    for part in module.modules():
        for place in held(part):
            for key, tensor in place.items():
                homes.setdefault(id(tensor), (place, key))
    return homes


def _as_integers(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.detach().reshape(-1).view(types[plain.element_size()])


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
