"""DGA: delayed gradient averaging (Zhu, Lin, Lu, Lin, Han, 2021).

Per step, with a delay of D steps:  x_i <- x_i - alpha (g_i^t - g_i^{t-D} + (1/n) sum_j g_j^{t-D}).
With tau local steps a round the sum of a round takes the gradient's place, one round late. d_i^r is
what the local steps of round r did to x_i, and d_i^{-1} = x_i^0:

    x_i^{r+1} = x_i^r + d_i^r - d_i^{r-1} + (1/n) sum_j d_j^{r-1}

The average forms under the local steps: a round takes max(tau, 2(n-1)/n c). The mean model follows
plain SGD exactly. These are the iterates of CoCoD-SGD: x_i^{r+1} = xbar^r + d_i^r in both, by
induction. The paper's agents start from one model, where any d^{-1} equal on all does; x_i^0 also
brings those together that start apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .base import Algorithm, state
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("dga")
@dataclass
class DGA(Algorithm):
    """Local SGD whose gradients are averaged a round late: max(tau, 2(n-1)/n c) a round."""

    d: Tensor = state()
    reads_gradient: ClassVar[bool] = False
    exchanged: ClassVar[int] = 0

    def schedule(self, agent: Runner) -> Schedule:
        self.init(d=agent.x.clone())
        for _ in agent.rounds():
            average = agent.all_reduce(self.d)  # of the round before
            x_old = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            d_new = agent.x - x_old
            agent.x.sub_(self.d)
            agent.x.add_(average.mean(x_old))
            self.d.copy_(d_new)
            del x_old, d_new  # not held beside the next ones
