"""One round of one mode of W, without curvature: when fragments fly, and the roots of the round.

A mode is an eigenvector v of W, with W v = lambda v. a = sum_i v_i x_i is how much of the agents'
disagreement lies in it, and y the same of xoldsgd's correction. From one departure of a fragment to
the next, with l of the tau steps in flight, r = l / tau and mu = 1 - lambda:

    a' = (lambda - (1 - r) gamma mu) a - y + drift        y' = y + gamma mu a

    T = 1 + lambda - (1 - r) gamma mu      D = lambda + r gamma mu      z^2 - T z + D = 0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import UserError
from ..topology import Topology
from ..topology.core import Floats, Ints
from .bound import check_tau

LARGEST = 2000
"""Agents. All eigenvalues of a larger W would take minutes."""


@dataclass(frozen=True)
class Flights:
    """When the fragments of one round leave, and how many steps old they are when mixed."""

    tau: int
    leaves: Ints
    ages: Ints

    @staticmethod
    def ldsgd(tau: int) -> Flights:
        """The whole model, mixed at once after the last step: the next round's step 0."""
        check_tau(tau)
        return Flights(tau, np.array([0]), np.array([0]))

    @staticmethod
    def oldsgd(tau: int, fragments: int = 1) -> Flights:
        """Fragment k leaves after step floor(k tau / P) and is mixed when the next one leaves."""
        check_tau(tau)
        if not 1 <= fragments <= tau:
            raise UserError(f"fragments must be from 1 to tau, which is {tau}, not {fragments}.")
        leaves = np.arange(fragments + 1) * tau // fragments
        return Flights(tau, leaves[:-1], np.diff(leaves))

    @property
    def shares(self) -> Floats:
        """The different values of r = l / tau; there are at most two."""
        return np.unique(self.ages) / self.tau


@lru_cache(maxsize=8)
def modes(graph: Topology) -> Floats:
    """The eigenvalues of W without the 1 of the mean, ascending, read-only."""
    if graph.period > 1:
        raise UserError(
            f"The {graph.name} changes every round, so it has no modes; take a static graph."
        )
    if graph.n > LARGEST:
        raise UserError(f"The modes of {graph.n} agents take too long; take at most {LARGEST}.")
    lam: Floats = np.linalg.eigvalsh(graph.W)[:-1].astype(np.float64)
    lam.setflags(write=False)
    return lam


def trace_and_determinant(lam: Any, gamma: Any, share: Any = 1.0) -> tuple[Any, Any]:
    """T and D of a round, the sum and the product of its roots."""
    pull = gamma * (1 - lam)
    return 1 + lam - (1 - share) * pull, lam + share * pull


def stable(lam: Any, gamma: Any, share: Any = 1.0) -> Any:
    """Whether both roots are inside the unit circle: 1 - T + D, 1 - D and 1 + T + D above 0."""
    T, D = trace_and_determinant(lam, gamma, share)
    return (gamma * (1 - lam) > 0) & (share * gamma < 1) & (1 + T + D > 0)  # 1 - D without rounding


def roots(lam: Any, gamma: Any, share: Any = 1.0) -> Any:
    """The two roots of a round, along a last axis of two."""
    return roots_of(*trace_and_determinant(np.asarray(lam), gamma, share))


def roots_of(T: Any, D: Any) -> Any:
    """The roots of z^2 - T z + D."""
    half = np.sqrt(np.asarray(T * T / 4 - D, dtype=complex))
    return np.stack([T / 2 + half, T / 2 - half], axis=-1)


def spectral_radius(lam: Any, gamma: float, flights: Flights) -> Any:
    """What one round leaves of a mode in the long run: the worst of the fragments.

    gamma = 0 has no correction. Its second root, 1, is that of y, which nothing moves.
    """
    if gamma == 0:
        return np.abs(lam)
    each = [np.abs(roots(lam, gamma, share)).max(axis=-1) for share in flights.shares]
    return np.max(each, axis=0)
