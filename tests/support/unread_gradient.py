"""Schedules that promise not to read the gradient, and compute with what they are handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hpc_oldsgd.algorithms import Algorithm
from hpc_oldsgd.runtime.runner import Runner, Schedule

READS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "x - g": lambda x, g: x.sub_(g),
    "x + g": lambda x, g: x + g,
    "2 g": lambda x, g: 2.0 * g,
    "-g": lambda x, g: -g,
    "torch.add": torch.add,
    "clone": lambda x, g: g.clone(),
    "copy_": lambda x, g: x.copy_(g),
    "norm": lambda x, g: g.norm(),
    "numpy": lambda x, g: g.numpy(),
    "shape": lambda x, g: g.shape,
    "item": lambda x, g: g[0],
    "g *= 2": lambda x, g: g.__imul__(2.0),
}


@dataclass
class Reads(Algorithm):
    """Breaks its promise."""

    tau: int = 1
    how: str = "x - g"
    reads_gradient: ClassVar[bool] = False

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            g = yield
            READS[self.how](agent.x, g)
            agent.descend(g)
            agent.exchange(agent.x).mix_into(agent.x)


@dataclass
class OwnDirection(Algorithm):
    """Descends along something that is not the gradient, without reading it."""

    tau: int = 2
    reads_gradient: ClassVar[bool] = False

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            for k in range(self.tau):
                g = yield
                agent.descend(g if k else agent.x * 0.5)
            agent.exchange(agent.x).mix_into(agent.x)
