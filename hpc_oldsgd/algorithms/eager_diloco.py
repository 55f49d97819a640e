"""Eager DiLoCo: DiLoCo whose average arrives a round late (Kale, Douillard, Donchev, 2025).

Agent i has a theta_i of its own. With D_i^{-1} = 0 and m_i = 0, round r is

    x_i <- theta_i;  tau local steps of any optimizer;  D_i^r = theta_i - x_i
    D = (1/n) sum_j D_j^{r-1} + (D_i^r - D_i^{r-1}) / n
    m_i <- mu m_i + D
    theta_i <- theta_i - eta (D + mu m_i)

D is the late average with the agent's own share made fresh. The average forms under the local
steps: a round takes max(tau, 2(n-1)/n c). The outer gradients of two agents differ by (D_i^r -
D_i^{r-1}) / n, which does not add up over the rounds: the agents stay together.

In round 0 there is no late average. The models are averaged instead, and theta_i begins from their
mean when it is there: else agents that start apart, as after the loss of one, would stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .base import state
from .diloco import OuterStep
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("eager_diloco")
@dataclass
class EagerDiLoCo(OuterStep):
    """DiLoCo with a late average and its own fresh share: max(tau, 2(n-1)/n c) a round."""

    D_own: Tensor = state()
    exchanged: ClassVar[int] = 0

    def schedule(self, agent: Runner) -> Schedule:
        first = not hasattr(self, "D_own")
        self.init(m=agent.zeros(), D_own=agent.zeros())
        for _ in agent.rounds():
            average = agent.all_reduce(agent.x if first else self.D_own)  # of the round before
            theta = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            agent.x.neg_().add_(theta)  # D_i^r
            D = (agent.x - self.D_own).div_(agent.n)
            self.D_own.copy_(agent.x)
            late = average.mean(theta if first else agent.x)
            if not first:
                D.add_(late)
            first = False
            agent.x.copy_(theta.sub_(self.nesterov(D)))
            del theta, late, D  # not held under the next local steps
