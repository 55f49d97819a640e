"""CO2: local SGD with an outer momentum on an average one round late (Sun et al., 2024).

Let x^r be the model at the top of round r, phi_i^r agent i's result of its local steps, phi_i^{-1}
= x_i^0 and m^0 = 0. Round r:

    phi_i^r = x^r after tau times  phi <- phi - alpha g_i(phi)
    m^{r+1} = beta m^r + (x^r - (1/n) sum_i phi_i^{r-1}) / Lambda
    x^{r+1} = x^r - lambda clip(m^{r+1}, phi)

The average is of the results of round r - 1; it starts when they are there, at the top of round r,
and forms under its tau local steps: a round takes max(tau, 2(n-1)/n c). clip bounds every entry of
m. What round r computes enters x^{r+2}, so with beta = 0 and Lambda = lambda two interleaved runs
of local SGD never meet; a positive beta or a Lambda above lambda couples them.
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


@register("co2")
@dataclass
class CO2(Algorithm):
    """Local SGD with outer momentum on a late average: max(tau, 2(n-1)/n c) a round."""

    beta: float = 0.5
    """Outer momentum."""

    outer: float = 1.0
    """The paper's lambda: step size of the outer update."""

    Lambda: float = 1.0
    """Staleness penalty: divides what the late average says."""

    clip_m: float | None = None
    """The paper's phi: bound on every entry of the outer momentum; none if not given."""

    phi: Tensor = state()
    m: Tensor = state()
    reads_gradient: ClassVar[bool] = False
    exchanged: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta < 1, f"beta must be at least 0 and below 1, not {self.beta}")
        require(0 < self.outer < inf, f"outer must be positive and finite, not {self.outer}")
        require(1 <= self.Lambda < inf, f"Lambda must be finite and at least 1, not {self.Lambda}")
        require(
            self.clip_m is None or self.clip_m > 0, f"clip_m must be positive, not {self.clip_m}"
        )

    def schedule(self, agent: Runner) -> Schedule:
        self.init(phi=agent.x.clone(), m=agent.zeros())
        for _ in agent.rounds():
            average = agent.all_reduce(self.phi)  # the results of the round before
            x_old = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            self.phi.copy_(agent.x)
            agent.x.copy_(x_old)
            late = (agent.x - average.mean(x_old)).div_(self.Lambda)
            self.m.mul_(self.beta).add_(late)
            del x_old, late  # not held under the next local steps
            m = self.m if self.clip_m is None else self.m.clamp(-self.clip_m, self.clip_m)
            agent.x.sub_(m * self.outer)
