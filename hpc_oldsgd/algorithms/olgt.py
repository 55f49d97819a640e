"""OLGT: LUGT with its communication overlapped (Zhou and Pu, 2025, as a counterexample).

Local steps are LUGT's. Where tau divides k+1,

    x_i^{k+1} = sum_j w_ij x_j^{k+1-tau} - eta sum_{t=k+1-tau}^{k} y_i^t
    y_i^{k+1} = sum_j w_ij y_j^{k+1-tau} + alpha sum_{t=k+1-tau}^{k} (g_i(x_i^{t+1}) - g_i(x_i^t))

x_i^{k+1-tau} leaves at the top of the round, y_i^{k+1-tau} once its gradient is there, and both
travel under the local steps: a round takes max(tau, 2c). It breaks at large tau.

As in LUGT the code keeps y / alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .lugt import LUGT
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("olgt")
@dataclass
class OLGT(LUGT):
    """Gradient tracking with local updates, overlapped: max(tau, 2c) a round."""

    def schedule(self, agent: Runner) -> Schedule:
        self.init(y=agent.zeros(), g_old=agent.zeros())
        for _ in agent.rounds():
            yield from self._one_step(agent) if self.tau == 1 else self._local_steps(agent)

    def _local_steps(self, agent: Runner) -> Schedule:
        x_flight = agent.exchange(agent.x)
        for k in range(self.tau):
            g = yield
            self.y.add_(g - self.g_old)
            self.g_old.copy_(g)
            if k == 0:
                y_flight = agent.exchange(self.y)
            agent.descend(self.y * self.eta)
        x_flight.mix_into(agent.x)
        y_flight.mix_into(self.y)  # the gradient at the mixed x opens the next round

    def _one_step(self, agent: Runner) -> Schedule:
        """After its only gradient a round has none left for y to hide under: the next one has."""
        y_flight = agent.exchange(self.y)
        x_flight = agent.exchange(agent.x)
        g = yield
        self.y.add_(g - self.g_old)
        self.g_old.copy_(g)
        y_flight.mix_into(self.y)
        agent.descend(self.y * self.eta)
        x_flight.mix_into(agent.x)
