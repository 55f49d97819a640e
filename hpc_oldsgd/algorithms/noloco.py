"""NoLoCo: an outer step without all-reduce, with whom one talks to (Kolehmainen et al., 2025).

Let phi_i be agent i's model at the top of a round, the slow weights, and m_i = 0 at the start:

    x_i <- phi_i;  tau local steps of any optimizer;  Delta_i = x_i - phi_i
    m_i <- mu m_i + eta sum_j w_ij Delta_j + gamma (sum_j w_ij phi_j - phi_i)
    phi_i <- phi_i + m_i

The paper averages over pairs drawn anew every round: W of a one-peer graph, with w = 1/2. It sends
phi and Delta. Both sums are linear, so one message does: with u = eta x + (gamma - eta) phi,

    m_i <- mu m_i + eta Delta_i + sum_j w_ij (u_j - u_i)

It leaves after the local steps: a round takes tau + c, never more than with phi under them and
Delta after them, max(tau, c) + c. gamma = eta, the default, sends eta x. eta = gamma = 1 with
mu = 0 is LDSGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from .base import require
from .diloco import OuterStep
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule


@register("noloco")
@dataclass
class NoLoCo(OuterStep):
    """Local steps and an outer step with the neighbours alone, blocking: tau + c a round."""

    outer_momentum: float = 0.5
    """The paper's alpha: momentum of the outer update."""

    pull: float | None = None
    """The paper's gamma: how strongly the models of neighbours are drawn together; outer if not
    given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.pull is None or 0 < self.pull < inf,
            f"pull must be positive and finite, not {self.pull}",
        )

    def schedule(self, agent: Runner) -> Schedule:
        self.init(m=agent.zeros())
        for _ in agent.rounds():
            phi = agent.x.clone()
            for _ in range(self.tau):
                g = yield
                agent.descend(g)
            u = agent.x * self.outer
            self.m.mul_(self.outer_momentum).add_(u).sub_(phi * self.outer)
            if self.pull is not None:
                u.add_(phi * (self.pull - self.outer))
            agent.exchange(u).mix_into(self.m)
            agent.x.copy_(phi.add_(self.m))
            del phi, u  # not held beside the next ones
