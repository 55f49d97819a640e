"""LSGD: Local SGD (Stich, 2018).

tau local steps, then x_i <- (1/n) sum_j x_j by a ring all-reduce: tau + 2(n-1)/n c a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Algorithm
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("lsgd")
@dataclass
class LSGD(Algorithm):
    """Local SGD with a blocking all-reduce: tau + 2(n-1)/n c a round."""

    reads_gradient: ClassVar[bool] = False
    exchanged: ClassVar[int] = 0

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            agent.all_reduce(agent.x).mean(agent.x)
