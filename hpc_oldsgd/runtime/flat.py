"""A module's trainable parameters and float buffers as views of one contiguous buffer x.

Optimizers, autograd and BatchNorm go on using their own tensors; mixing and MPI see one vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Running:
    """Running statistics, as BatchNorm keeps them, at the end of x: averages that forget.

    A pass leaves 1 - momentum of what they were, of a plain average over N passes N / (N + 1). Of
    what neighbours differed by when the snapshots were taken only as much is added as is left by
    now: as if it had been mixed in then. Added in full it would overshoot: variances below zero,
    and from ten passes or so on differences that grow from round to round.
    """

    start: int
    norms: list[list[Any]]
    """Of every agent here."""
    keep: Tensor
    """1 - momentum of each, and 1 for what is no statistic."""
    average: Tensor
    """Which of them are plain averages over all passes: momentum None."""
    which: Tensor
    """The norm of every element from `start` on."""

    def passes(self) -> Tensor:
        """So far, of every agent and norm; on the device, nobody waits for it."""
        rows = [torch.stack([norm.num_batches_tracked for norm in own]) for own in self.norms]
        return nn.functional.pad(torch.stack(rows), (0, 1))

    def left(self, since: Tensor) -> Tensor:
        """(agents, d - start): the share of an earlier value that is left."""
        # Agent by agent: torch's powers may differ in the last bit with the length of a vector.
        rows = []
        for now, then in zip(self.passes(), since, strict=True):
            plain = torch.where(now > then, then / now.clamp(min=1), 1.0)
            rows.append(torch.where(self.average, plain, self.keep ** (now - then)))
        return torch.stack(rows)[:, self.which]


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

    def running(self, *others: Flat) -> Running | None:
        """Of this module, and of others like it."""
        norms = [_norms(flat.module) for flat in (self, *others)]
        number = {
            id(statistic): k
            for k, norm in enumerate(norms[0])
            for statistic in (norm.running_mean, norm.running_var)
        }
        slots = [slot for slot in self.slots if id(slot.tensor) in number]
        if not slots:
            return None
        start = slots[0].offset  # buffers come last
        which = torch.full((self.d - start,), len(norms[0]), device=self.device)
        for slot in slots:
            which[slot.offset - start :][: slot.tensor.numel()] = number[id(slot.tensor)]
        keep = [1.0 - (norm.momentum or 0.0) for norm in norms[0]]
        average = [norm.momentum is None and not _is_instance_norm(norm) for norm in norms[0]]
        return Running(
            start, norms, torch.tensor([*keep, 1.0], device=self.device),
            torch.tensor([*average, False], device=self.device), which,
        )  # fmt: skip

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


def _norms(module: nn.Module) -> list[Any]:
    """Those with running statistics, each of which counts its passes from now on."""
    kind = nn.modules.batchnorm._NormBase
    found = [m for m in module.modules() if isinstance(m, kind) and m.track_running_stats]
    for norm in filter(_is_instance_norm, found):
        if _count_pass not in norm._forward_hooks.values():
            norm.register_forward_hook(_count_pass)
    return found


def _is_instance_norm(norm: nn.Module) -> bool:
    return isinstance(norm, nn.modules.instancenorm._InstanceNorm)


def _count_pass(norm: Any, *_: Any) -> None:
    """torch gives InstanceNorm BatchNorm's counter, and does not count."""
    if norm.training:
        norm.num_batches_tracked.add_(1)


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
