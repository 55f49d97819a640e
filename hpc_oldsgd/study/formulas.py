"""The paper's formulas for the time of a round.

They stand here and in the docs, and nowhere in the code that is measured: neither the clock nor a
schedule knows one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WARM_UP = 2  # rounds before those that count; LUGT's first has one message less than the others


@dataclass(frozen=True)
class Formula:
    """A round's time; `at(tau, c, a)` with a the time of an all-reduce, 2(n-1)/n c on a ring."""

    text: str
    at: Callable[[float, float, float], float]


FORMULAS = {
    "oldsgd": Formula("max(tau, c)", lambda tau, c, a: max(tau, c)),
    "ldsgd": Formula("tau + c", lambda tau, c, a: tau + c),
    "dsgd": Formula("1 + c", lambda tau, c, a: tau + c),
    "dsgd_cta": Formula("max(1, c)", lambda tau, c, a: max(tau, c)),
    "kgt": Formula("max(tau, c) + c", lambda tau, c, a: max(tau, c) + c),
    "lugt": Formula("tau + 2c", lambda tau, c, a: tau + 2 * c),
    "led": Formula("tau + c", lambda tau, c, a: tau + c),
    "lsgd": Formula("tau + 2(n-1)/n c", lambda tau, c, a: tau + a),
    "olgt": Formula("max(tau, 2c)", lambda tau, c, a: max(tau, 2 * c)),
    "oled": Formula("max(tau, c)", lambda tau, c, a: max(tau, c)),
    "cocod": Formula("max(tau, 2(n-1)/n c)", lambda tau, c, a: max(tau, a)),
    "overlap_local_sgd": Formula("max(tau, 2(n-1)/n c)", lambda tau, c, a: max(tau, a)),
    "co2": Formula("max(tau, 2(n-1)/n c)", lambda tau, c, a: max(tau, a)),
    "xoldsgd": Formula("max(tau, c)", lambda tau, c, a: max(tau, c)),
    "dga": Formula("max(tau, 2(n-1)/n c)", lambda tau, c, a: max(tau, a)),
    "diloco": Formula("tau + 2(n-1)/n c", lambda tau, c, a: tau + a),
    "eager_diloco": Formula("max(tau, 2(n-1)/n c)", lambda tau, c, a: max(tau, a)),
    "noloco": Formula("tau + c", lambda tau, c, a: tau + c),
    "moldsgd": Formula("max(tau, c)", lambda tau, c, a: max(tau, c)),
}


@dataclass(frozen=True)
class Measured:
    """One measurement: units of a gradient in virtual time, seconds over MPI."""

    algorithm: str
    formula: str
    n: int
    tau: int
    c: float
    expected: float | None
    measured: float


def evaluate(name: str, tau: float, c: float, a: float) -> float | None:
    """None for an algorithm of another package: there is a measurement but no formula."""
    return FORMULAS[name].at(tau, c, a) if name in FORMULAS else None


def text_of(name: str) -> str:
    return FORMULAS[name].text if name in FORMULAS else "?"
