"""Overlap-Local-SGD: local models pulled to an anchor z that is averaged behind them (Wang, Liang,
Joshi, 2020).

Let x_i^r be the models at the top of round r, z^0 = (1/n) sum_i x_i^0 and v^0 = 0. Round r:

    phi_i <- x_i^r;  tau times  phi_i <- phi_i - alpha g_i(phi_i)
    v^{r+1} = gamma v^r + ((1/n) sum_i x_i^r - z^r);  z^{r+1} = z^r + v^{r+1}
    x_i^{r+1} = (1 - a) phi_i + a z^{r+1}

The average of x^r, the models after the last pull-back, forms under the tau local steps: a round
takes max(tau, 2(n-1)/n c). z is the same on every agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .base import Algorithm, require, state
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("overlap_local_sgd")
@dataclass
class OverlapLocalSGD(Algorithm):
    """Local SGD pulled to a late anchor, overlapped: max(tau, 2(n-1)/n c) a round."""

    a: float = 0.6
    """Pull of the anchor, from 0 (none) to 1 (the anchor replaces the model)."""

    gamma: float = 0.7
    """Momentum of the anchor."""

    z: Tensor = state()
    v: Tensor = state()
    reads_gradient: ClassVar[bool] = False
    exchanged: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.a <= 1, f"a must be from 0 to 1, not {self.a}")
        require(0 <= self.gamma < 1, f"gamma must be at least 0 and below 1, not {self.gamma}")

    def schedule(self, agent: Runner) -> Schedule:
        first = not hasattr(self, "z")
        self.init(z=agent.zeros(), v=agent.zeros())
        for _ in agent.rounds():
            average = agent.all_reduce(agent.x)
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            mean = average.mean(agent.zeros())
            if first:
                self.z.copy_(mean)
                first = False
            self.v.mul_(self.gamma)
            self.v.add_(mean.sub_(self.z))
            self.z.add_(self.v)
            del mean  # not held under the next local steps
            agent.x.sub_((agent.x - self.z).mul_(self.a))
