"""DiLoCo: local steps, then an outer step with Nesterov momentum (Douillard et al., 2023).

Let theta be the model at the top of a round, and m = 0 at the start. A round:

    x_i <- theta;  tau local steps of any optimizer
    D = theta - (1/n) sum_i x_i
    m <- mu m + D
    theta <- theta - eta (D + mu m)

Nothing is hidden: a round takes tau + 2(n-1)/n c. eta = 1 with mu = 0 is LSGD. The optimizer's own
state, AdamW's moments say, stays with each agent, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .base import Algorithm, require, state
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@dataclass
class OuterStep(Algorithm):
    """Base of those that treat the change of a whole round as a gradient."""

    outer: float = 0.7
    """The paper's eta: step size of the outer update."""

    outer_momentum: float = 0.9
    """The paper's mu: momentum of the outer update."""

    m: Tensor = state()
    reads_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.outer < inf, f"outer must be positive and finite, not {self.outer}")
        require(
            0 <= self.outer_momentum < 1,
            f"outer_momentum must be at least 0 and below 1, not {self.outer_momentum}",
        )

    def nesterov(self, D: Tensor) -> Tensor:
        """What the outer step takes from theta, in D's memory."""
        self.m.mul_(self.outer_momentum).add_(D)
        return D.add_(self.m * self.outer_momentum).mul_(self.outer)


@register("diloco")
@dataclass
class DiLoCo(OuterStep):
    """Local steps and an outer Nesterov step, blocking: tau + 2(n-1)/n c a round."""

    exchanged: ClassVar[int] = 0

    def schedule(self, agent: Runner) -> Schedule:
        self.init(m=agent.zeros())
        for _ in agent.rounds():
            theta = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            agent.all_reduce(agent.x).mean(agent.x)
            D = theta - agent.x
            agent.x.copy_(theta.sub_(self.nesterov(D)))
            del theta, D  # not held beside the next ones
