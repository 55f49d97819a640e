"""LED: local exact diffusion (Alghunaim, 2024).

Round r, with y_i = 0 at the start:

    phi <- x_i;  tau times  phi <- phi - alpha g_i(phi) - beta y_i
    x_i <- sum_j w_ij phi_j
    y_i <- y_i + phi_i - x_i

Nothing is hidden: a round takes tau + c. sum_i y_i = 0 always, so the mean model follows plain SGD.
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
    from ..transport.base import Flight


@register("led")
@dataclass
class LED(Algorithm):
    """Local exact diffusion, blocking: tau + c a round."""

    beta: float | None = None
    """Weight of the correction in each local step; 1/tau if not given (1 diverges at large tau)."""

    y: Tensor = state()
    reads_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.beta is None or 0 <= self.beta < inf,
            f"beta must be finite and at least 0, not {self.beta}",
        )

    @property
    def weight(self) -> float:
        return 1 / self.tau if self.beta is None else self.beta

    def schedule(self, agent: Runner) -> Schedule:
        self.init(y=agent.zeros())
        for _ in agent.rounds():
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
                agent.x.sub_(self.y * self.weight)
            self.correct(agent, agent.exchange(agent.x))

    def correct(self, agent: Runner, flight: Flight) -> None:
        """x_i <- x_i + e_i, y_i <- y_i - e_i, where e_i is what the neighbours differ."""
        e = agent.zeros()
        flight.mix_into(e)
        agent.x.add_(e)
        self.y.sub_(e)
