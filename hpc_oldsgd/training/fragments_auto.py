"""`--fragments auto`: as many fragments as cost no time worth naming, so the freshest models.

x in P fragments is tau / P steps old when it is mixed. In the same bytes and the same compute a
round with more fragments is slower for two reasons only: a short flight has less slack where
gradients differ in length, and each message has a cost of its own. Both are measured, and the
schedule runs with them on the virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..errors import UserError
from ..simulation.clock import Clock
from ..simulation.stacked import StackedTransport
from ..topology import Topology
from . import tau_auto

WORTH = 1.07  # a round may take so many times as long as one of x whole: docs/overlap.md has why
STEPS = 400  # of the virtual clock, where gradients differ in length


@dataclass(frozen=True)
class Cost:
    """What an exchange of a whole model takes, in gradients, sent at once or in `most` parts."""

    whole: float
    parts: float
    most: int = 1
    stall: float = 0.0
    """What each further message costs that nothing hides."""

    def c(self, P: int) -> float:
        """A message costs as many bytes as it has and something besides, so this is a line."""
        if self.most == 1:
            return self.whole
        more = (self.parts - self.whole) / (self.most - 1)
        return max(self.whole + more * (P - 1), 0.0)


@dataclass(frozen=True)
class Fragments:
    P: int
    reason: str


def whole(algorithm: Algorithm) -> Algorithm:
    """The same algorithm that sends x at once."""
    return with_fragments(algorithm, 1)


def with_fragments(algorithm: Algorithm, P: int) -> Algorithm:
    return replace(algorithm, fragments=P) if isinstance(algorithm, Fragmented) else algorithm


def choose(
    algorithm: Algorithm, topology: Topology, cost: Cost, *, jitter: float = 0.0, **clock: Any
) -> Fragments:
    """The most fragments with which a round of the algorithm's tau is about as fast as with one."""
    if topology.n == 1:
        return Fragments(1, "one agent sends nothing")

    def length(P: int) -> float:
        at = {**clock, "c": cost.c(P), "jitter": jitter}
        return _round(with_fragments(algorithm, P), topology, at) + (P - 1) * cost.stall

    at_once = length(1)
    for P in candidates(algorithm, topology):
        ratio = length(P) / at_once
        if ratio <= WORTH or P == 1:
            break
    reason = f"gradients differ by {jitter:.0%}, " if jitter else ""
    return Fragments(P, f"{reason}a round takes {ratio:.3g} times what it takes with one fragment")


def candidates(algorithm: Algorithm, topology: Topology) -> list[int]:
    """From many to one: of each shortest flight the most fragments; stable on this graph."""
    tau = algorithm.tau
    found = []
    for P in sorted({tau // steps for steps in range(1, tau + 1)}, reverse=True):
        try:
            with_fragments(algorithm, P).check(topology)
        except UserError:  # xoldsgd's gamma, with as many fragments
            continue
        found.append(P)
    return found or [1]


def _round(algorithm: Algorithm, topology: Topology, clock: dict[str, Any]) -> float:
    """In gradients: the mean of many where they differ."""
    tau, period = algorithm.tau, topology.period
    count = tau_auto.ROUNDS + period
    if clock["jitter"]:
        count += max(period, -(-STEPS // tau))
    marks = tau_auto.run(
        algorithm, tau, StackedTransport(topology, Clock(topology.n, **clock)), count
    )
    rest = marks[tau_auto.ROUNDS - 1 :]
    return (rest[-1] - rest[0]) / (len(rest) - 1)
