"""CoCoD-SGD: computation and communication decoupled (Shen et al., 2019).

    x_i <- (1/n) sum_j x_j^{t-tau} + (x_i - x_i^{t-tau})      every tau local steps

OLDSGD on the complete graph with w = 1/n, by all-reduce: the average of the models as they were at
the top of the round forms under its local steps, and a round takes max(tau, 2(n-1)/n c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Algorithm
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("cocod")
@dataclass
class CoCoDSGD(Algorithm):
    """Local SGD with an overlapped all-reduce: max(tau, 2(n-1)/n c) a round."""

    reads_gradient: ClassVar[bool] = False
    exchanged: ClassVar[int] = 0

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            average = agent.all_reduce(agent.x)
            x_old = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            agent.x.sub_(x_old)  # what the local steps did
            agent.x.add_(average.mean(x_old))
            del x_old  # not held beside the next one
