"""What the theory of OLDSGD (Zhou, Pu 2025) promises: the largest step size and its bound.

For L-smooth f_i, gradient noise bounded by sigma^2 and heterogeneity by zeta^2, where M and P let
the two grow with the squared gradient, and with p = 1 - lambda_2^2:

    C = 12 (2 tau + M) n (P + 1) / p        D = 6 ((2 tau + M) n zeta^2 + n sigma^2) / p

    alpha <= min{ 1/L, n / (4 L M (P + 1)), n / (L M), p / (16 L sqrt(3 tau (2 tau + M))),
                  1/(32 L) sqrt(p n / (2 C tau)) }

    (1/T) sum_t E||grad f(xbar^t)||^2 <= 8 (f(xbar^0) - f*) / (alpha T)
        + (8 alpha L / n) (sigma^2 / 2 + M zeta^2) + (1024 L^2 / n) (D tau / p) alpha^2

The theorem is about a static W. For a graph that changes every round, p is that of a whole period,
and the numbers are an indication only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UserError
from ..topology import Topology


@dataclass(frozen=True)
class Problem:
    """The constants of the assumptions."""

    L: float = 1.0
    """Smoothness: the largest curvature of any f_i."""
    sigma: float = 1.0
    """Standard deviation of a stochastic gradient."""
    zeta: float = 1.0
    """Heterogeneity: the root mean square distance between an agent's gradient and the mean one."""
    M: float = 0.0
    """Growth of the noise's variance with the squared gradient."""
    P: float = 0.0
    """Growth of the squared heterogeneity with the squared gradient."""

    def __post_init__(self) -> None:
        if not (self.L > 0 and math.isfinite(self.L)):
            raise UserError(f"L must be positive and finite, not {self.L:g}.")
        for name in ("sigma", "zeta", "M", "P"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise UserError(f"{name} must be finite and not negative, not {value:g}.")


def constants(problem: Problem, graph: Topology, tau: int) -> tuple[float, float]:
    """C and D, which carry the consensus error into the rule and the bound."""
    n, p, M = graph.n, _p(graph), problem.M
    C = 12 * (2 * tau + M) * n * (problem.P + 1) / p
    D = 6 * ((2 * tau + M) * n * problem.zeta**2 + n * problem.sigma**2) / p
    return C, D


def step_size_limits(problem: Problem, graph: Topology, tau: int) -> dict[str, float]:
    """The five terms of the rule, by the formula of each; infinite where M = 0 lifts a limit."""
    check_tau(tau)
    n, p, L, M, P = graph.n, _p(graph), problem.L, problem.M, problem.P
    C, _ = constants(problem, graph, tau)
    return {
        "1/L": 1 / L,
        "n/(4 L M (P+1))": n / (4 * L * M * (P + 1)) if M else math.inf,
        "n/(L M)": n / (L * M) if M else math.inf,
        "p/(16 L sqrt(3 tau (2 tau + M)))": p / (16 * L * math.sqrt(3 * tau * (2 * tau + M))),
        "1/(32 L) sqrt(p n/(2 C tau))": math.sqrt(p * n / (2 * C * tau)) / (32 * L),
    }


def max_step_size(problem: Problem, graph: Topology, tau: int) -> float:
    """The largest alpha that the rule allows."""
    return min(step_size_limits(problem, graph, tau).values())


def bound_terms(
    problem: Problem, graph: Topology, tau: int, *, alpha: float, T: int, gap: float
) -> dict[str, float]:
    """The three terms of the bound on the mean squared gradient over T steps; gap = f^0 - f*."""
    check_tau(tau)
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(f"alpha must be positive and finite, not {alpha:g}.")
    if T < 1:
        raise UserError(f"T must be at least 1 iteration, not {T}.")
    if not (gap >= 0 and math.isfinite(gap)):
        raise UserError(f"The gap f^0 - f* must be finite and not negative, not {gap:g}.")
    n, p, L = graph.n, _p(graph), problem.L
    _, D = constants(problem, graph, tau)
    noise = problem.sigma**2 / 2 + problem.M * problem.zeta**2
    return {
        "8 (f^0 - f*)/(alpha T)": 8 * gap / (alpha * T),
        "(8 alpha L/n)(sigma^2/2 + M zeta^2)": 8 * alpha * L / n * noise,
        "(1024 L^2/n)(D tau/p) alpha^2": 1024 * L**2 / n * (D * tau / p) * alpha**2,
    }


def bound(
    problem: Problem, graph: Topology, tau: int, *, alpha: float, T: int, gap: float
) -> float:
    """The bound on (1/T) sum_t E||grad f(xbar^t)||^2, valid for alpha up to `max_step_size`."""
    return sum(bound_terms(problem, graph, tau, alpha=alpha, T=T, gap=gap).values())


def _p(graph: Topology) -> float:
    if graph.p <= 0:  # lambda_2 so close to 1 that its square rounds to it
        raise UserError(
            f"The {graph.name} of {graph.n} agents mixes too slowly for the theory: p is 0."
        )
    return graph.p


def check_tau(tau: int) -> None:
    if tau < 1:
        raise UserError(f"tau must be at least 1 local step, not {tau}.")
