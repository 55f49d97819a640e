"""OLDSGD: Overlapping Local Decentralized SGD (Zhou and Pu, 2025).

    x_i^t = sum_j w_ij x_j^{t-tau} - alpha sum_{k=t-tau}^{t-1} g_i^k      if tau divides t
    x_i^t = x_i^{t-1} - alpha g_i^{t-1}                                   otherwise

The snapshot x_i^{t-tau} travels under the tau gradients that follow it: a round takes
max(tau, c). The mean model follows plain SGD exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from .base import Algorithm, require, state
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("oldsgd")
@dataclass
class OLDSGD(Algorithm):
    """Overlapped local decentralized SGD: max(tau, c) a round."""

    form: Literal["delta", "gradient"] = "delta"
    """delta adds what the neighbours differ and fits any optimizer; gradient is the paper's sum,
    for plain SGD. Equal up to rounding."""

    acc: Tensor = state()
    reads_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.form in ("delta", "gradient"),
            f'form must be "delta" or "gradient", not {self.form!r}',
        )
        if self.form == "gradient":  # shadows the class's for this one
            self.reads_gradient = self.rebuilds_x = True  # type: ignore[misc]

    def schedule(self, agent: Runner) -> Schedule:
        if self.form == "gradient":
            return self._gradient_form(agent)
        return self._delta_form(agent)

    def _delta_form(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            flight = agent.exchange(agent.x)  # x_i^{t-tau} starts moving
            for _ in range(self.tau):
                g = yield  # gradient at x, on a fresh batch          | hidden under
                agent.descend(g)  # x_i <- x_i - alpha g, any optimizer | the flight
            flight.mix_into(agent.x, snapshot=True)  # one fused pass

    def _gradient_form(self, agent: Runner) -> Schedule:
        self.init(acc=agent.zeros())
        for _ in agent.rounds():
            flight = agent.exchange(agent.x)
            alpha = 0.0
            for k in range(self.tau):
                g = yield
                alpha = alpha if k else agent.alpha  # a scheduler may step between two rounds
                require(
                    agent.alpha == alpha,
                    'the step size changed inside a round: use form="delta" with schedulers',
                )
                self.acc += g
                agent.descend(g)
            flight.mix(agent.x, self.acc, alpha, zero_acc=True, snapshot=True)
