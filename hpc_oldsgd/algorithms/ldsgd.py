"""LDSGD: local decentralized SGD (Koloskova et al., 2020).

    x_i^t = sum_j w_ij (x_j^{t-1} - alpha g_j^{t-1})      if tau divides t
    x_i^t = x_i^{t-1} - alpha g_i^{t-1}                   otherwise

Nothing is hidden: the models travel when the local steps are done, a round takes tau + c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Algorithm
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("ldsgd")
@dataclass
class LDSGD(Algorithm):
    """Local decentralized SGD, blocking: tau + c a round."""

    reads_gradient: ClassVar[bool] = False

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            agent.exchange(agent.x).mix_into(agent.x)  # out and back while the agent stands still
