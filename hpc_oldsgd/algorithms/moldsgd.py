"""MOLDSGD: OLDSGD with Nesterov momentum between the rounds.

Let theta_i be agent i's model at the top of a round, and m_i = 0 at the start. A round:

    x_i <- theta_i;  tau local steps and the mixing of OLDSGD, in fragments or not
    D_i = theta_i - x_i
    m_i <- mu m_i + D_i
    theta_i <- theta_i - eta (D_i + mu m_i)

This is the outer step of DiLoCo without its all-reduce and without its wait: a round takes
max(tau, c), with one message. Mixing and momentum are linear and W keeps the mean. So the mean
model takes DiLoCo's steps exactly, from gradients at the agents' own models. D_i holds what the
mixing did too. Thus m_i remembers where the neighbours go together and forgets noise of its own:
the quasi-global momentum of Lin, Karimireddy, Stich and Jaggi (2021), and SlowMo without its exact
average (Wang, Tantia, Ballas and Rabbat, 2020), both under overlap. eta = 1 with mu = 0 is OLDSGD.

Per mode lambda of W, without gradients, theta and m are multiplied by a matrix of determinant
mu (1 - eta h) and trace 1 + mu - eta h (1 + mu), h = 1 - lambda. It is stable for
h < 2 (1 + mu) / (eta (1 + 2 mu)), which a lambda near -1 may break; `check` knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import require
from .diloco import OuterStep
from .fragments import Fragmented
from .registry import register
from .xoldsgd import least_eigenvalue

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule
    from ..topology import Topology


@register("moldsgd")
@dataclass
class MOLDSGD(Fragmented, OuterStep):
    """OLDSGD and an outer Nesterov step, both overlapped: max(tau, c) a round."""

    reads_gradient: ClassVar[bool] = False

    def check(self, topology: Topology) -> None:
        least = least_eigenvalue(topology)
        eta, mu = self.outer, self.outer_momentum
        require(
            least is None or eta * (1 - least) * (1 + 2 * mu) < 2 * (1 + mu),
            f"moldsgd with outer = {eta:g} and outer_momentum = {mu:g} is not stable on this "
            f"{topology.name}: take a smaller outer, or --weights lazy",
        )

    def schedule(self, agent: Runner) -> Schedule:
        self.init(m=agent.zeros())
        for _ in agent.rounds():
            theta = agent.x.clone()
            for steps, (x,) in self.flights(agent, agent.x):
                flight = agent.exchange(x)
                for _ in range(steps):
                    g = yield
                    agent.descend(g)
                flight.mix_into(x)
            D = theta - agent.x
            agent.x.copy_(theta.sub_(self.nesterov(D)))
            del theta, D  # not held beside the next ones
