"""`--tau auto`: the smallest tau that hides the messages.

How tau and c make a round is not written down per algorithm: its schedule runs on the virtual
clock, with c and the gradient's time as measured, until more local steps hide nothing more.
"""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..algorithms import Algorithm
from ..errors import UserError
from ..runtime.plain import Plain
from ..simulation.clock import Clock
from ..simulation.stacked import StackedTransport
from ..topology import Topology
from ..transport.base import LINE

MARGIN = 1.2  # a message that competes with a gradient for cores and memory takes longer
ENOUGH, TOO_MUCH = 1.05, 1.5  # a tau in use is kept between these
ROUNDS = 4  # of the virtual clock, after which every schedule has found its pace
PLENTY = 64  # local steps that hide a message of one gradient's length, if any number does
ROUNDING = 1e-6


@dataclass(frozen=True)
class Bounds:
    """What `--tau auto` or `--tau auto:LOW-HIGH` allows."""

    low: int = 1
    high: int = 64

    @classmethod
    def parse(cls, text: str) -> Bounds:
        if text == "auto":
            return cls()
        match = re.fullmatch(r"auto:(\d+)-(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"--tau {text}: write a number, auto, or auto:LOW-HIGH as in auto:2-40, from 1 up"
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Pace:
    """Slowest rank's seconds for a gradient, and for a message alone; units in the simulator."""

    gradient: float
    exchange: float = 0.0
    all_reduce: float = 0.0

    def c(self, kinds: set[str], n: int) -> float:
        """Time of a model-sized message in gradients, as the virtual clock counts them."""
        costs = []
        if "exchange" in kinds:
            costs.append(self.exchange)
        if "all_reduce" in kinds and n > 1:
            costs.append(self.all_reduce * n / (2 * (n - 1)))
        return max(costs, default=0.0) / max(self.gradient, 1e-9)


@dataclass(frozen=True)
class Choice:
    tau: int
    reason: str


def choose(
    algorithm: Algorithm,
    topology: Topology,
    c: float,
    bounds: Bounds,
    *,
    margin: float = MARGIN,
    **clock: Any,
) -> Choice:
    """The smallest tau within the bounds that hides a message of c gradients."""
    if topology.n == 1:
        return Choice(bounds.low, "one agent sends nothing")
    floor = _waits_always(algorithm, topology, clock)
    padded = c * margin

    def hides(tau: int) -> bool:
        waits = _excess(algorithm, tau, topology, padded, clock)
        return waits <= floor * padded + ROUNDING * max(1.0, padded)

    # Fewer steps than fragments would make fragments larger. Doubled, then halved: each try runs a
    # schedule.
    low = tau = min(max(bounds.low, algorithm.P), bounds.high)
    while tau < bounds.high and not hides(tau):
        low, tau = tau + 1, min(2 * tau, bounds.high)
    tau = bisect.bisect_left(range(tau), True, lo=min(low, tau), key=hides)
    reason = f"a message takes {c:.3g} gradients"
    if margin != 1:
        reason += f", {padded:.3g} with a margin"
    if not hides(tau):
        reason += (
            f"; {tau} is the most that is allowed and hides a part only: --wire bf16 or a graph "
            "of fewer neighbours sends less"
        )
    elif floor:
        reason += f"; {algorithm.name} waits for one more at any tau"
    elif tau == bounds.low > 1:
        reason += "; this is the least that is allowed"
    return Choice(tau, reason)


def keep(algorithm: Algorithm, topology: Topology, c: float, bounds: Bounds) -> Choice:
    """The same during a run: the algorithm's own tau where it still hides and is not far more."""
    wanted = choose(algorithm, topology, c, bounds)
    least = choose(algorithm, topology, c, bounds, margin=ENOUGH)
    if least.tau <= algorithm.tau <= math.ceil(TOO_MUCH * wanted.tau):
        return Choice(algorithm.tau, wanted.reason)
    return wanted


def kinds(algorithm: Algorithm, topology: Topology) -> set[str]:
    """What a round sends: exchange, all_reduce."""
    transport = StackedTransport(topology, Clock(topology.n))
    run(algorithm, algorithm.tau, transport, 2)
    return {record.kind for record in transport.records}


def check(algorithm: Algorithm, topology: Topology) -> None:
    """Raises UserError where no tau hides anything."""
    _waits_always(algorithm, topology, {})


def _waits_always(algorithm: Algorithm, topology: Topology, clock: dict[str, Any]) -> float:
    """Messages a round that no tau hides."""
    floor = _excess(algorithm, PLENTY, topology, 1.0, clock)
    if topology.n > 1 and _excess(algorithm, 1, topology, 8.0, clock) <= 8 * floor + ROUNDING:
        raise UserError(
            f"--tau auto: {algorithm.name} stands still while its messages travel, so no tau "
            "hides them: give --tau a number"
        )
    return floor if floor > ROUNDING else 0.0


def _excess(
    algorithm: Algorithm, tau: int, topology: Topology, c: float, clock: dict[str, Any]
) -> float:
    """What a round takes beyond its gradients, at the pace of the slowest agent."""
    transport = StackedTransport(topology, Clock(topology.n, c, **clock))
    marks = run(algorithm, tau, transport, ROUNDS + topology.period)
    period = topology.period  # rounds of a graph that changes differ, so a whole period counts
    took = (marks[-1] - marks[-1 - period]) / period
    return took - tau / float(np.min(clock.get("speed", 1.0)))


def run(algorithm: Algorithm, tau: int, transport: StackedTransport, rounds: int) -> list[float]:
    """Virtual times at the round boundaries of a schedule without a problem."""
    tried = algorithm.with_tau(tau)
    x = torch.zeros(transport.n, LINE * tried.P)  # so that fragments are equally long
    runner = Plain(x, tried, transport, alpha=1.0)
    marks: list[float] = []
    runner.on_round.append(lambda _: marks.append(transport.now()))
    runner.start()
    g = torch.zeros_like(x)
    while runner.r < rounds:
        runner.advance(g)
    runner.finish()
    return marks
