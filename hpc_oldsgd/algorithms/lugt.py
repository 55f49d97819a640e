"""LUGT: gradient tracking with local updates (Nguyen, Alghunaim, Yuan, Uribe, 2023).

With y_i^0 = alpha g_i(x_i^0), every step k is

    x_i^{k+1} = x_i^k - eta y_i^k
    y_i^{k+1} = y_i^k + alpha g_i(x_i^{k+1}) - alpha g_i(x_i^k)

and where tau divides k+1 both results are mixed with W: x first, so that the new gradient is taken
at the mixed x, then y. Nothing is hidden: a round takes tau + 2c. Each gradient is drawn once and
serves as the new term of its step and the old term of the next, so sum_i y_i is always alpha times
the sum of the latest gradients.

The code keeps y / alpha, which is in units of a gradient, and descends along eta y: the same for
plain SGD, and well defined for any optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .base import Algorithm, require, state
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("lugt")
@dataclass
class LUGT(Algorithm):
    """Gradient tracking with local updates, blocking: tau + 2c a round."""

    eta: float = 1.0
    """Step along the tracked direction, times alpha."""

    y: Tensor = state()
    g_old: Tensor = state()
    exchanged: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eta > 0, f"eta must be positive, not {self.eta}")

    def schedule(self, agent: Runner) -> Schedule:
        first = not hasattr(self, "y")
        self.init(y=agent.zeros(), g_old=agent.zeros())
        for _ in agent.rounds():
            for k in range(self.tau):
                g = yield
                self.y.add_(g - self.g_old)
                self.g_old.copy_(g)
                if k == 0 and not first:  # y belongs to the x mixed just before; y^0 does not
                    agent.exchange(self.y).mix_into(self.y)
                agent.descend(self.y * self.eta)
            first = False
            agent.exchange(agent.x).mix_into(agent.x)
