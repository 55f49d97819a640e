"""The disagreement on a graph that changes every round, without correction.

Of a fragment that leaves in round r, a is what the agents disagree in, as a vector of n:

    a_{r+1} = W_r a_r - (the gradients of tau steps)

Its covariance and its mean over a period follow from the matrices of the period, where a static
graph has a formula for each mode (disagreement.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..topology import Topology
from ..topology.core import Floats
from .modes import Flights

ROUNDING = 1e-16


def varying(graph: Topology, flights: Flights, sigma: float, zeta: Any) -> tuple[float, float]:
    """(1/n) sum_i E||x_i - xbar||^2 over alpha^2: where a round begins, mean of its steps."""
    n, tau = graph.n, flights.tau
    Ws = [graph.matrix(r) for r in range(graph.period)]
    apart = np.eye(n) - 1 / n
    z = apart * zeta * np.sqrt(n / max(n - 1, 1)) if np.ndim(zeta) == 0 else apart @ _rows(zeta)
    variance = _departing_variance(Ws, apart) * tau * sigma**2
    each = sigma**2 * (n - 1) / n  # noise of a step
    before = _departing_means(Ws, apart) * tau @ z
    after = np.array([W @ m for W, m in zip(Ws, before, strict=True)])

    def square(age: Any, step: Any) -> Floats:
        """`step` steps after its departure, averaged over the period."""
        mixed = np.asarray(step) >= age
        by_noise = variance - mixed * tau * each + step * each
        m2 = np.where(mixed, (after**2).sum(), (before**2).sum())
        mz = np.where(mixed, (after * z).sum(), (before * z).sum())
        by_drift = (m2 + 2 * step * mz) / len(Ws) + step**2 * (z**2).sum()
        return np.asarray(by_noise + by_drift / n)

    ages, counts = np.unique(flights.ages, return_counts=True)
    boundary = square(flights.ages, (tau - flights.leaves) % tau).mean()
    mean = np.average([square(age, np.arange(tau)).mean() for age in ages], weights=counts)
    return float(boundary), float(mean)


def _departing_variance(Ws: list[Floats], noise: Floats) -> float:
    """tr S_r / n, averaged over the period, where S_{r+1} = W_r S_r W_r + noise."""
    period, S = np.eye(len(noise)), np.zeros_like(noise)
    for W in Ws:
        S, period = W @ S @ W.T + noise, W @ period
    period = period @ noise  # what is equal in all agents is no disagreement
    while np.abs(period).max() > ROUNDING:  # S = sum_k period^k S_0 period^k, twice as many a turn
        S, period = S + period @ S @ period.T, period @ period
    total = 0.0
    for W in Ws:
        total += float(np.trace(S))
        S = W @ S @ W.T + noise
    return total / len(Ws) / len(noise)


def _departing_means(Ws: list[Floats], drift: Floats) -> Floats:
    """M_r of each round, where M_{r+1} = W_r M_r + drift."""
    period, M = np.eye(len(drift)), np.zeros_like(drift)
    for W in Ws:
        M, period = W @ M + drift, W @ period
    M = np.asarray(np.linalg.solve(np.eye(len(drift)) - period @ drift, M), dtype=np.float64)
    found = []
    for W in Ws:
        found.append(M)
        M = W @ M + drift
    return np.array(found)


def _rows(zeta: Any) -> Floats:
    rows = np.asarray(zeta, dtype=np.float64)
    return rows.reshape(len(rows), -1)
