"""All agents' gradients in one vectorised pass, for small models whose time goes into calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..errors import UserError
from ..tasks import Task
from ..torch_private import DROPOUTS

if TYPE_CHECKING:
    from ..training.loop import Worker


class Loss(nn.Module):
    """The task's loss as a module's forward pass, for functional_call."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, *batch: Tensor) -> Tensor:
        return self.task.loss(self.model, batch)


class VmapGradients:
    """Equal to one agent after the other up to rounding; half the time for the digits' CNN."""

    def __init__(self, task: Task, workers: Sequence[Worker]) -> None:
        model = workers[0].model
        if (why := unfit(task, model)) is not None:
            raise UserError(f"--gradients together does not fit {task.name}: {why}")
        self.workers = workers
        loss = Loss(model, task)

        def one(parameters: dict[str, Tensor], batch: Any) -> Tensor:
            named = {f"model.{name}": p for name, p in parameters.items()}
            value: Tensor = functional_call(loss, named, batch)
            return value

        self._all = vmap(grad_and_value(one))
        own = [dict(worker.model.named_parameters()) for worker in workers]
        self._same: dict[str, list[Tensor]] = {n: [each[n] for each in own] for n in own[0]}

    def backward(self, k: int) -> list[float]:
        """Leaves the gradient of every agent's k-th batch in its p.grad; the losses."""
        batches = zip(*(worker.shard.batch(k) for worker in self.workers), strict=True)
        batch = tuple(torch.stack(parts) for parts in batches)
        with torch.no_grad():
            stacked = {name: torch.stack(same) for name, same in self._same.items()}
        gradients, losses = self._all(stacked, batch)
        for name, same in self._same.items():
            for p, g in zip(same, gradients[name].unbind(), strict=True):
                p.grad = g
        values: list[float] = losses.tolist()
        return values


def unfit(task: Task, model: nn.Module) -> str | None:
    """Why a model cannot be vectorised over agents; None if it can."""
    if any(True for _ in model.buffers()):
        return "the model has buffers, as BatchNorm does"
    if any(isinstance(m, DROPOUTS) and getattr(m, "p", 1) > 0 for m in model.modules()):
        return "the model drops activations at random"
    if any(not p.requires_grad for p in model.parameters()):
        return "the model has frozen parameters"
    if task.clip is not None:
        return "its gradients are clipped"
    return None
