"""XOLDSGD: OLDSGD with a damped correction, exact where the agents' data differ.

With y_i = 0 at the start:

    each local step   x_i <- x_i - alpha g_i (or any optimizer's step), then x_i <- x_i - y_i / tau
    at the mix        e = sum_j w_ij (s_j - s_i),   x_i <- x_i + e,   y_i <- y_i - gamma e

s are the snapshots, of x whole or of one fragment (fragments.py). They travel under the local
steps: a round takes max(tau, c), with one message. sum_i y_i = 0 always, so the mean model follows
plain SGD exactly. gamma = 0 is OLDSGD. gamma = 1 with P = 1 is OLED, which stands on the border of
stability: per mode lambda of W the round has the roots of

    z^2 - (1 + lambda) z + lambda + gamma (1 - lambda) = 0

whose product is below 1 exactly for gamma < 1. In fragments gamma has a second limit where W has a
lambda near -1 (docs/theory.md); `check` knows it. y is a displacement of x, so when a scheduler
changes alpha, y is scaled by the same factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from .base import require, state
from .fragments import Fragmented
from .registry import register

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule
    from ..topology import Topology

LARGEST_N = 2000  # agents: the eigenvalues of more take too long


def least_eigenvalue(topology: Topology) -> float | None:
    """Of W; None where it changes, or has none but 1, or is too large."""
    if topology.period > 1 or not 2 <= topology.n <= LARGEST_N:
        return None
    return float(np.linalg.eigvalsh(topology.matrix())[0])


@register("xoldsgd")
@dataclass
class XOLDSGD(Fragmented):
    """OLDSGD with a damped correction, exact and overlapped: max(tau, c) a round."""

    gamma: float = 0.1
    """Damping of the correction, at least 0 and below 1; 0 is oldsgd."""

    y: Tensor = state()
    alpha_of_y: Tensor = state()
    reads_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.gamma < 1,
            f"gamma must be at least 0 and below 1, where it is no longer stable, not {self.gamma}",
        )

    def check(self, topology: Topology) -> None:
        """Where r < 1/2, also gamma (1 - lambda) (1 - 2r) < 2 (1 + lambda) must hold."""
        r = self.tau // self.P / self.tau  # how old the freshest fragment is, in rounds
        least = least_eigenvalue(topology)
        if r >= 0.5 or not self.gamma or least is None:
            return
        limit = 2 * (1 + least) / ((1 - least) * (1 - 2 * r))
        require(
            self.gamma < limit,
            f"xoldsgd with {self.P} fragments is not stable on this {topology.name} with gamma = "
            f"{self.gamma:g}: take gamma below {limit:.2g}, fewer fragments, or --weights lazy",
        )

    def schedule(self, agent: Runner) -> Schedule:
        self.init(y=agent.zeros(), alpha_of_y=torch.tensor(agent.alpha, dtype=torch.float64))
        for _ in agent.rounds():
            for steps, (x, y) in self.flights(agent, agent.x, self.y):
                flight = agent.exchange(x)
                for _ in range(steps):
                    g = yield
                    agent.descend(g)
                    if self.follow(agent.alpha):
                        agent.x.sub_(self.y * (1 / self.tau))
                flight.mix_into(x, also=(y, -self.gamma) if agent.alpha else None)

    def follow(self, alpha: float) -> bool:
        """Scale y with the step size; False while that is 0, when nothing is to be corrected."""
        before = float(self.alpha_of_y)
        if alpha and alpha != before:
            if before:
                self.y.mul_(alpha / before)
            self.alpha_of_y.fill_(alpha)
        return bool(alpha)
