"""OLED: LED with its communication overlapped (Zhou and Pu, 2025, as a counterexample).

    phi <- x_i^r;  tau times  phi <- phi - alpha g_i(phi) - beta y_i
    x_i^{r+1} = sum_j w_ij x_j^r + (phi_i - x_i^r)
    y_i <- y_i + phi_i - x_i^{r+1}

x_i^r travels under the local steps: a round takes max(tau, c). The paper prints a gradient-tracking
line for y here, which is not LED's; this is LED's own, with the mixed model one round old. The
correction then reacts a round late, and agents come to agree far more slowly than in LED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .led import LED
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("oled")
@dataclass
class OLED(LED):
    """Local exact diffusion, overlapped: max(tau, c) a round."""

    def schedule(self, agent: Runner) -> Schedule:
        self.init(y=agent.zeros())
        for _ in agent.rounds():
            flight = agent.exchange(agent.x)
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
                agent.x.sub_(self.y * self.weight)
            self.correct(agent, flight)
