"""How far the agents are apart in the long run, when gradients do not depend on x.

g_i = zeta_i + noise of variance sigma^2. A mode of W gets the drift h = sum_i v_i zeta_i and noise
of variance sigma^2 in every step. When a fragment leaves, in units of alpha^2,

    E a^2 = 2 K,   E a y = -gamma mu K,   E y^2 = gamma mu (1 + D) K     times sigma^2
    K = tau / ((1 - D) (1 + T + D)),   which is tau / (2 (1 - lambda^2)) without correction

and the mean of a is -h tau / mu without correction and 0 with it. docs/theory.md derives this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..topology import Topology
from ..topology.core import Floats
from .modes import LARGEST, Flights, modes, stable, trace_and_determinant
from .varying import varying


class Size(NamedTuple):
    """An expected square: where a round begins, and averaged over where its gradients are taken."""

    boundary: Any
    mean: Any


def noise(lam: Floats, flights: Flights, gamma: float = 0.0) -> Size:
    """E a^2 of each mode from noise alone, over alpha^2 sigma^2; infinite where unstable."""
    lam, tau = np.asarray(lam, dtype=np.float64)[:, None], flights.tau

    def square(age: Any, step: Any) -> Floats:
        T, D = trace_and_determinant(lam, gamma, age / tau)
        pull = gamma * (1 - lam)
        settles = stable(lam, gamma, age / tau) if gamma else np.abs(lam) < 1
        K = tau / np.where(settles, (1 - D) * (1 + T + D), np.nan)
        u, v = _carried(lam, pull, tau, age, step)
        moments = u * u * 2 * K - 2 * u * v * pull * K + v * v * pull * (1 + D) * K
        return np.where(settles, moments + step, np.inf)

    return _over_a_round(square, flights)


def drift(lam: Floats, flights: Flights, gamma: float = 0.0) -> Size:
    """a^2 of each mode from constant heterogeneity alone, over alpha^2 h^2."""
    lam, tau = np.asarray(lam, dtype=np.float64)[:, None], flights.tau

    def square(age: Any, step: Any) -> Floats:
        if gamma:
            return np.where(stable(lam, gamma, age / tau), 0.0, np.inf) + 0 * step
        u, _ = _carried(lam, 0.0, tau, age, step)
        return (u * tau / (1 - lam) + step) ** 2

    return _over_a_round(square, flights)


def disagreement(
    graph: Topology,
    flights: Flights,
    *,
    alpha: float = 1.0,
    sigma: float = 1.0,
    zeta: Any = 1.0,
    gamma: float = 0.0,
) -> Size:
    """(1/n) sum_i E||x_i - xbar||^2.

    zeta is either the gradients of the agents, (n, d), or their root mean square distance from
    the mean one, which is then taken to lie in all modes alike.
    """
    if graph.period > 1 and gamma == 0 and graph.n <= LARGEST:
        boundary, mean = varying(graph, flights, sigma, _checked(graph, zeta))
        return Size(alpha**2 * boundary, alpha**2 * mean)
    lam = modes(graph)
    by_noise, by_drift = noise(lam, flights, gamma), drift(lam, flights, gamma)
    h2 = _squares_by_mode(graph, zeta)

    def total(a: Floats, b: Floats) -> float:
        return float(alpha**2 * (sigma**2 * a + h2 * b).sum() / graph.n)

    return Size(*(total(a, b) for a, b in zip(by_noise, by_drift, strict=True)))


def _carried(lam: Any, pull: Any, tau: int, age: Any, step: Any) -> tuple[Any, Any]:
    """u and v: `step` steps after its departure, a is u a + v y plus the drift of these steps."""
    mixed = lam - pull * (step - age) / tau
    return np.where(step >= age, mixed, 1.0), -step / tau


def _over_a_round(square: Callable[[Any, Any], Floats], flights: Flights) -> Size:
    """`square` of (age, steps since departure), averaged over the fragments."""
    tau = flights.tau
    boundary = square(flights.ages, (tau - flights.leaves) % tau).mean(axis=1)
    ages, counts = np.unique(flights.ages, return_counts=True)
    each = [square(age, np.arange(tau)).mean(axis=1) for age in ages]
    return Size(boundary, np.average(each, axis=0, weights=counts))


def _squares_by_mode(graph: Topology, zeta: Any) -> Any:
    zeta = _checked(graph, zeta)
    if np.ndim(zeta) == 0:
        return zeta**2 * graph.n / max(graph.n - 1, 1)
    vectors = np.linalg.eigh(graph.W)[1][:, :-1]
    return ((vectors.T @ zeta.reshape(graph.n, -1)) ** 2).sum(axis=1)


def _checked(graph: Topology, zeta: Any) -> Any:
    if np.ndim(zeta) == 0:
        return zeta
    zeta = np.asarray(zeta, dtype=np.float64)
    if len(zeta) != graph.n:
        raise UserError(f"zeta must have a row for each of {graph.n} agents, not {len(zeta)}.")
    return zeta
