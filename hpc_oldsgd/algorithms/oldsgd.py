"""OLDSGD: Overlapping Local Decentralized SGD (Zhou and Pu, 2025).

    x_i^t = sum_j w_ij x_j^{t-tau} - alpha sum_{k=t-tau}^{t-1} g_i^k      if tau divides t
    x_i^t = x_i^{t-1} - alpha g_i^{t-1}                                   otherwise

The snapshot x_i^{t-tau} travels under the tau gradients that follow it: a round takes
max(tau, c). The mean model follows plain SGD exactly. In fragments (fragments.py) the same holds,
and what is mixed is fresher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from .base import require, state
from .fragments import Fragmented
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("oldsgd")
@dataclass
class OLDSGD(Fragmented):
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
            for steps, (x,) in self.flights(agent, agent.x):  # x whole, or its fragments in turn
                flight = agent.exchange(x)  # x_i^{t-tau} starts moving
                for _ in range(steps):
                    g = yield  # gradient at x, on a fresh batch          | hidden under
                    agent.descend(g)  # x_i <- x_i - alpha g, any optimizer | the flight
                flight.mix_into(x, snapshot=x is agent.x)  # one fused pass

    def _gradient_form(self, agent: Runner) -> Schedule:
        self.init(acc=agent.zeros())
        for _ in agent.rounds():
            for k, (steps, (x, acc)) in enumerate(self.flights(agent, agent.x, self.acc)):
                flight = agent.exchange(x)
                alpha = 0.0
                for step in range(steps):
                    g = yield
                    alpha = alpha if step else agent.alpha  # a scheduler may step between flights
                    require(
                        agent.alpha == alpha,
                        'the step size changed inside a round: use form="delta" with schedulers',
                    )
                    acc += agent.cut(g, self.P)[k]
                    agent.descend(g)
                flight.mix(x, acc, alpha, zero_acc=True, snapshot=x is agent.x)
