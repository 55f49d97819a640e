"""Plain SGD for the program's own runs, in torch.optim.SGD's bits and state.

torch's optimizers import its compiler before their first step: two of five seconds, and 70 of 360
MB, with which a rank of a small model starts. For momentum and AdamW they are used all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError


class SGD:
    """x <- x - alpha (g + weight_decay x), with as much of torch's interface as runs need."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        group = {"params": list(params), "lr": lr, "weight_decay": weight_decay, "momentum": 0.0}
        self.param_groups: list[dict[str, Any]] = [group]

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            if p.grad is not None:
                g = p.grad.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else p.grad
                p.add_(g, alpha=-group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.param_groups[0]["params"]:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        (group,) = self.param_groups
        numbers = list(range(len(group["params"])))
        return {"state": {}, "param_groups": [{**group, "params": numbers}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (saved,) = state["param_groups"]
        self.param_groups[0].update({k: saved[k] for k in ("lr", "weight_decay")})


Optimizer = torch.optim.Optimizer | SGD


def one_alpha(optimizer: Optimizer) -> float:
    """The step size, for algorithms that compute with it."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise UserError(
            f"this algorithm computes with one step size, and the optimizer's groups have "
            f'{len(rates)}: give all the same, or use oldsgd with form="delta"'
        )
    return rates.pop()
