"""xoldsgd's gamma: where it is stable, what it costs in noise, how fast it corrects, which suits.

Without correction the agents stay 1/mu rounds of drift apart for ever. With it that ends, and the
sum of the squares until then is worth a number of such rounds (`correction_rounds`). A larger
gamma corrects sooner and adds noise (`noise_growth`). Where the losses are curved, a correction
that is no longer right is slow to go (`memory_rounds`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..topology import Topology
from ..topology.core import Floats
from .disagreement import noise
from .modes import Flights, modes, roots_of, spectral_radius, trace_and_determinant

NOISE = 1.1
"""`damping` lets noise disagree by this factor more than without correction."""
LARGEST_GAMMA = 0.5
"""With r = 1 a larger gamma corrects no sooner."""


def critical_damping(lam: Any, share: Any = 1.0) -> Any:
    """The gamma at which the two roots of a mode meet: (1 - lambda) / 4 for share 1.

    Not a number where they are real for every gamma.
    """
    inside = share + (1 - share) * np.asarray(lam, dtype=np.float64)
    return (1 - lam) / (1 + np.sqrt(np.where(inside < 0, np.nan, inside))) ** 2


def gamma_limit(lam: Floats, flights: Flights) -> float:
    """xoldsgd is stable for every gamma above 0 and below this; it is never above 1."""
    slack = [2 * (1 + lam) / ((1 - lam) * (1 - 2 * r)) for r in flights.shares if r < 0.5]
    return float(np.min([1.0, *np.ravel(slack)]))


def noise_growth(lam: Floats, gamma: float, flights: Flights) -> float:
    """Disagreement from noise, averaged over the steps, against that of gamma = 0."""
    if not len(lam):
        return 1.0
    return float(noise(lam, flights, gamma).mean.sum() / noise(lam, flights).mean.sum())


def correction_rounds(lam: Floats, gamma: float, flights: Flights) -> float:
    """How many rounds of OLDSGD's disagreement from drift it takes to end it, all modes alike.

    Both are measured where a fragment leaves. Infinite without correction or stability.
    """
    if not 0 < gamma < gamma_limit(lam, flights):
        return float("inf")
    ages, counts = np.unique(flights.ages, return_counts=True)
    T, D = trace_and_determinant(lam[:, None], gamma, ages / flights.tau)
    on_the_way = (1 + D) / (gamma * (1 - lam[:, None]) * (1 - D) * (1 + T + D))
    total = np.average(on_the_way, axis=1, weights=counts).sum()
    return float(total / ((1 - lam) ** -2.0).sum()) if len(lam) else 0.0


def memory_rounds(lam: Any, gamma: float, flights: Flights, curvature: float) -> Any:
    """Rounds after which 1/e is left of a correction that is no longer right, per mode.

    `curvature` is alpha h: a local step takes a to (1 - alpha h) a. Infinite where unstable. The
    steps of a round, with q = 1 - alpha h and s(m) = 1 + q + ... + q^(m-1), make

        a' = (q^tau - mu q^(tau-l) - gamma mu s(tau-l) / tau) a - (s(tau) / tau) y
    """
    tau, pull = flights.tau, gamma * (1 - np.asarray(lam, dtype=np.float64))
    powers = (1 - curvature) ** np.arange(tau + 1.0)
    sums = np.concatenate([[0.0], np.cumsum(powers[:-1])])
    radius = np.zeros_like(pull)
    for age in np.unique(flights.ages):
        rest = tau - age
        kept = powers[tau] - (1 - lam) * powers[rest] - pull * sums[rest] / tau
        z = roots_of(1 + kept, kept + pull * sums[tau] / tau)
        radius = np.maximum(radius, np.abs(z).max(axis=-1))
    return np.where(radius < 1, -1 / np.log(np.minimum(radius, 1 - 1e-16)), np.inf)


def damping(graph: Topology, tau: int, fragments: int = 1) -> float:
    """The gamma that suits a graph: the largest of 0.01, 0.02, ... 0.5 that costs 10% in noise."""
    lam, flights = modes(graph), Flights.oldsgd(tau, fragments)
    suits = 0.01
    for gamma in np.arange(1, round(LARGEST_GAMMA * 100) + 1) / 100:
        if noise_growth(lam, gamma, flights) > NOISE:
            break
        suits = float(gamma)
    return suits


def worst_radius(lam: Floats, gamma: float, flights: Flights) -> float:
    """What a round leaves of the slowest mode."""
    return float(np.max(spectral_radius(lam, gamma, flights), initial=0.0))
