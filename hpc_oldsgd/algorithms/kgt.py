"""K-GT: tracking with K = tau local steps (Liu, Lin, Koloskova, Stich, 2024).

Round r, with c_i = 0 at the start:

    x <- x_i^r;  tau times  x <- x - eta_c (g_i(x) + c_i)
    z_i = (x_i^r - x) / (tau eta_c)
    c_i <- c_i - z_i + sum_j w_ij z_j
    x_i^{r+1} = sum_j w_ij (x_j^r - tau eta_c eta_s z_j)

eta_c is the optimizer's step size alpha. x_i^r travels under the local steps, z_i after them: a
round takes max(tau, c) + c. sum_i c_i = 0 always.

c_i corrects what the optimizer makes of a gradient: it is subtracted after its step. For plain SGD
that is the equation above. Fed to the optimizer, momentum would enlarge c_i and AdamW rescale it,
while z_i measures x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from .base import Algorithm, require, state
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("kgt")
@dataclass
class KGT(Algorithm):
    """Gradient tracking over local steps, half overlapped: max(tau, c) + c a round."""

    eta_s: float = 1.0
    """How much of the round's progress is kept: the paper's outer step size."""

    c: Tensor = state()
    reads_gradient: ClassVar[bool] = False
    exchanged: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eta_s > 0, f"eta_s must be positive, not {self.eta_s}")

    def schedule(self, agent: Runner) -> Schedule:
        self.init(c=agent.zeros())
        for _ in agent.rounds():
            early = agent.exchange(agent.x)  # x_i^r, under the local steps
            x_old = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
                agent.x.sub_(self.c * agent.alpha)
            scale = self.tau * agent.alpha
            require(scale > 0, "kgt divides by the step size, and it is 0: start it above 0")
            z = (x_old - agent.x).div_(scale)
            late = agent.exchange(z)  # z_i, while the agent stands still
            early.mix_into(x_old)  # sum_j w_ij x_j^r
            e = agent.zeros()
            late.mix_into(e)  # sum_j w_ij z_j - z_i: sums to zero whatever the wire rounds
            self.c.add_(e)
            agent.x.copy_(x_old.sub_(z.add_(e).mul_(scale * self.eta_s)))
            del x_old, z, e  # not held under the next local steps
