"""The rule of `--auto`: hide everything with the least staleness; among plans that do, the least
disagreement that theory predicts. `--tau auto` and `--fragments auto` have less to choose from.

How tau and c make a round is not written down per algorithm: its schedule runs on the virtual
clock, with the times as measured. x in P fragments is tau / P steps old when it is mixed. More
fragments cost time for two reasons only: a short flight has less slack where gradients differ in
length, and each message has a cost of its own.

Under gradients messages take longer than alone. How much, only a trial shows (trial.py). A plan
that failed its trial is left out, and every flight on its graph is as much longer from then on.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..errors import UserError
from ..runtime.plain import Plain
from ..simulation.clock import Clock
from ..simulation.stacked import StackedTransport
from ..theory import Flights, disagreement
from ..topology import Topology
from ..transport.base import LINE
from .plan import Allowed, Bounds, Measured, Message, Plan, Tried, in_parts

MARGIN = 1.2  # a message that competes with a gradient for cores and memory takes longer
WORTH = 1.07  # what nothing hides may lengthen a round by so much: docs/overlap.md has why
HOLDS = (
    1.05  # the same in a trial: a run has an optimizer besides, and more time to get out of step
)
ENOUGH, TOO_MUCH = 1.05, 1.5  # a tau in use is kept between these
ROUNDS = 4  # of the virtual clock, after which every schedule has found its pace
STEPS = 400  # of the virtual clock, where gradients differ in length
PLENTY = 64  # local steps that hide a message of one gradient's length, if any number does
ROUNDING = 1e-6
KNOWN = ("oldsgd", "xoldsgd")  # to the theory of how far agents are apart
TRIALS, TRIALS_OF_TAU = 8, 3  # that may fail: of all plans, of those with one tau


@dataclass(frozen=True)
class Way:
    """One graph and one wire. Times are in gradients."""

    algorithm: Algorithm
    """With the fragments that are asked for, or one."""
    topology: Topology
    c: float
    """Of an exchange of the whole model, as the virtual clock counts."""
    message: Message = field(default_factory=lambda: Message(0.0))
    jitter: float = 0.0
    margin: float = MARGIN
    clock: dict[str, Any] = field(default_factory=dict)
    slower: float = 0.0
    """How much longer each flight takes under gradients than alone, as a trial has shown."""

    @property
    def padded(self) -> float:
        return self.c * self.margin + self.algorithm.P * self.slower

    @property
    def floor(self) -> float:
        """Messages a round that no tau hides."""
        floor = self._excess(PLENTY, 1.0)
        if self.topology.n > 1 and self._excess(1, 8.0) <= 8 * floor + ROUNDING:
            raise UserError(
                f"--tau auto: {self.algorithm.name} stands still while its messages travel, so no "
                "tau hides them: give --tau a number"
            )
        return floor if floor > ROUNDING else 0.0

    def hides(self, tau: int, floor: float) -> bool:
        """The messages wholly, and what nothing hides is too little to be worth naming."""
        waits = self._excess(tau, self.padded)
        hidden = waits <= floor * self.padded + ROUNDING * max(1.0, self.padded)
        return hidden and self.stall(self.algorithm.P) <= (WORTH - 1) * tau

    def least_tau(self, bounds: Bounds, floor: float) -> int:
        """The smallest that hides, or the largest that is allowed."""
        # Fewer steps than fragments would make fragments larger. Doubled, then halved: each try
        # runs a schedule.
        low = tau = min(max(bounds.low, self.algorithm.P), bounds.high)
        while tau < bounds.high and not self.hides(tau, floor):
            low, tau = tau + 1, min(2 * tau, bounds.high)
        return bisect.bisect_left(
            range(tau), True, lo=min(low, tau), key=lambda tau: self.hides(tau, floor)
        )

    def stall(self, P: int) -> float:
        return max(self.message.stall + (P - 1) * self.message.more_stall, 0.0)

    def flights(self, P: int) -> float:
        """All P of a round one after the other, alone."""
        return max(self.c + (P - 1) * self.message.more, 0.0)

    def length(self, tau: int, P: int) -> float:
        """Of a round in P fragments, with jitter and what nothing hides."""
        at = {**self.clock, "c": self.flights(P) + P * self.slower, "jitter": self.jitter}
        tried, period = with_fragments(self.algorithm.with_tau(tau), P), self.topology.period
        count = ROUNDS + period
        if self.jitter:
            count += max(period, -(-STEPS // tau))
        marks = run(
            tried, tau, StackedTransport(self.topology, Clock(self.topology.n, **at)), count
        )
        rest = marks[ROUNDS - 1 :]
        return (rest[-1] - rest[0]) / (len(rest) - 1) + self.stall(P)

    def whole(self, tau: int) -> float:
        """A round of x whole, whose messages cost nothing of their own."""
        return self.length(tau, 1) - self.stall(1)

    def lengthened(self, tau: int, P: int) -> float:
        return self.length(tau, P) / self.whole(tau)

    def apart(self, tau: int, P: int) -> float:
        """How far agents are apart by theory; OLDSGD's where it does not know the algorithm."""
        gamma = getattr(self.algorithm, "gamma", 0.0) if self.topology.period == 1 else 0.0
        try:
            return disagreement(self.topology, Flights.oldsgd(tau, P), gamma=gamma).mean
        except UserError:  # too many agents
            return tau / max(self.topology.p, 1e-9)

    def reason(self, tau: int, floor: float, bounds: Bounds) -> str:
        told = f"a message takes {self.c:.3g} gradients"
        if self.slower:
            told += f", {self.padded:.3g} under gradients"
        elif self.margin != 1:
            told += f", {self.padded:.3g} with a margin"
        if not self.hides(tau, floor):
            return told + (
                f"; {tau} is the most that is allowed and hides a part only: --wire int4 or a "
                "graph of fewer neighbours sends less"
            )
        if floor:
            return f"{told}; {self.algorithm.name} waits for one more at any tau"
        return told + "; this is the least that is allowed" * (tau == bounds.low > 1)

    def _excess(self, tau: int, c: float) -> float:
        """What a round takes beyond its gradients, at the pace of the slowest agent."""
        period = self.topology.period  # rounds of a graph that changes differ: a whole period
        transport = StackedTransport(self.topology, Clock(self.topology.n, c, **self.clock))
        marks = run(self.algorithm, tau, transport, ROUNDS + period)
        took = (marks[-1] - marks[-1 - period]) / period
        return took - tau / float(np.min(self.clock.get("speed", 1.0)))


def choose(
    algorithm: Algorithm,
    graphs: Mapping[str, Topology],
    measured: Measured,
    allowed: Allowed,
    *,
    margin: float = MARGIN,
    tried_only: bool = False,
    **clock: Any,
) -> Plan:
    """The plan for these measurements, and why; of those that were tried where only they count."""
    n = next(iter(graphs.values())).n
    if n == 1:
        tau, parts = allowed.tau.low, allowed.fragments or 1
        why = "one agent sends nothing"
        return Plan(next(iter(graphs)), allowed.wires[0], tau, min(tau, parts), why)
    algorithm = with_fragments(algorithm, allowed.fragments or 1)
    ways = {
        key: _way(algorithm, graphs[pair(key)[0]], message, measured, margin, clock)
        for key, message in measured.messages.items()
    }
    ways = _under_gradients(ways, measured)
    asks_tau = allowed.tau.low < allowed.tau.high
    floors = {key: way.floor if asks_tau else 0.0 for key, way in ways.items()}
    least = {key: way.least_tau(allowed.tau, floors[key]) for key, way in ways.items()}
    hiding = {key: tau for key, tau in least.items() if ways[key].hides(tau, floors[key])}
    if not hiding:  # then the fastest
        parts = algorithm.P
        key = min(least, key=lambda key: ways[key].length(least[key], parts) / least[key])
        hiding = {key: least[key]}
    order = _in_order(ways, hiding, measured.tried, allowed)
    best = None if tried_only else next(order, None)
    key, tau, P, ratio = best or _best_tried(ways, measured.tried)
    reason = [ways[key].reason(tau, floors[key], allowed.tau)] if asks_tau else []
    if len(ways) > 1:
        other = {k: t for k, t in least.items() if k != key and {*pair(k)} & {*pair(key)}}
        told = ", ".join(f"{t} with {k}" for k, t in other.items())
        apart = ways[key].apart(tau, P)
        known = "" if algorithm.name in KNOWN else " of oldsgd"
        reason.append(f"tau would be {told}; agents are {apart:.3g} apart by theory{known}")
    if allowed.fragments is None and in_parts(algorithm):
        jitter = f"gradients differ by {measured.jitter:.0%}, " if measured.jitter else ""
        reason.append(f"{jitter}a round takes {ratio:.3g} times what it takes in one piece")
    return Plan(*pair(key), tau, P, "; ".join(reason))


Choice = tuple[str, int, int, float]
"""Graph and wire, tau, fragments; and how much longer a round is than in one piece."""


def _in_order(
    ways: Mapping[str, Way], hiding: Mapping[str, int], tried: tuple[Tried, ...], allowed: Allowed
) -> Iterator[Choice]:
    """What hides, without what has failed: by tau, then by how far agents are apart."""
    failed = failures(tried)
    if len(failed) >= TRIALS:
        return
    for tau in range(min(hiding.values()), allowed.tau.high + 1):
        if sum(one.tau == tau for one in failed) >= TRIALS_OF_TAU:
            continue
        found = []
        for order, (key, way) in enumerate(ways.items()):  # wide wires first: nothing to gain
            if hiding.get(key, math.inf) <= tau:
                for P in candidates(way.algorithm.with_tau(tau), way.topology, allowed):
                    if not any(one.rules_out(key, tau, P) for one in failed):
                        found.append((way.apart(tau, P), order, P, key))
        for _, _, P, key in sorted(found):
            asked = P > 1 and allowed.fragments is None
            ratio = ways[key].lengthened(tau, P) if asked else 1.0
            if ratio <= WORTH:
                yield key, tau, P, ratio


def _best_tried(ways: Mapping[str, Way], tried: tuple[Tried, ...]) -> Choice:
    """The same rule for what was seen, where nothing did what it should."""
    fastest = min(one.step for one in tried)
    good = [one for one in tried if one.step <= WORTH * fastest]
    best = min(good, key=lambda one: (one.tau, ways[one.key].apart(one.tau, one.fragments)))
    way = ways[best.key]
    ratio = way.lengthened(best.tau, best.fragments) if best.fragments > 1 else 1.0
    return best.key, best.tau, best.fragments, ratio


def expected(algorithm: Algorithm, graph: Topology, measured: Measured, plan: Plan) -> float:
    """Seconds of a step of the plan if all is hidden that can be, and nothing costs time itself."""
    message = measured.messages[f"{plan.topology} {plan.wire}"]
    way = _way(with_fragments(algorithm, 1), graph, message, measured, MARGIN, {})
    return way.whole(plan.tau) / plan.tau * measured.gradient


def check_overlaps(algorithm: Algorithm, topology: Topology, bounds: Bounds) -> None:
    """Raises UserError where a tau is to be chosen and none hides anything."""
    if bounds.low < bounds.high:
        Way(algorithm, topology, 0.0).floor  # noqa: B018


def pair(key: str) -> tuple[str, str]:
    """Graph and wire; a graph may be a file, whose name may have spaces."""
    graph, _, wire = key.rpartition(" ")
    return graph, wire


def _way(
    algorithm: Algorithm, topology: Topology, message: Message, measured: Measured, margin: float,
    clock: dict[str, Any],
) -> Way:  # fmt: skip
    unit = max(measured.gradient, 1e-9)
    used = kinds(algorithm, topology)
    c = c_of(used, topology.n, message.seconds, measured.all_reduce) / unit
    scaled = Message(**{name: value / unit for name, value in asdict(message).items()})
    return Way(algorithm, topology, c, scaled, measured.jitter, margin, clock)


def failures(tried: tuple[Tried, ...]) -> list[Tried]:
    return [one for one in tried if one.longer > HOLDS]


def _under_gradients(ways: Mapping[str, Way], measured: Measured) -> dict[str, Way]:
    """With what failed trials tell about a graph's flights: they ended when the round did."""
    slower: dict[Topology, float] = {}
    for one in failures(measured.tried):
        way, P = ways[one.key], one.fragments
        round_ = one.step * one.tau / max(measured.gradient, 1e-9)
        each = (round_ - way.stall(P) - way.flights(P)) / P
        slower[way.topology] = max(slower.get(way.topology, 0.0), each)
    return {k: replace(way, slower=slower.get(way.topology, 0.0)) for k, way in ways.items()}


def c_of(used: set[str], n: int, exchange: float, all_reduce: float) -> float:
    """Time of a model-sized message, as the virtual clock counts it."""
    costs = [exchange] if "exchange" in used else []
    if "all_reduce" in used and n > 1:
        costs.append(all_reduce * n / (2 * (n - 1)))
    return max(costs, default=0.0)


def keep(algorithm: Algorithm, topology: Topology, c: float, bounds: Bounds) -> tuple[int, str]:
    """The same during a run: the algorithm's own tau where it still hides and is not far more."""
    if topology.n == 1:
        return algorithm.tau, "one agent sends nothing"
    way = Way(algorithm, topology, c)
    floor = way.floor
    wanted = way.least_tau(bounds, floor)
    least = replace(way, margin=ENOUGH).least_tau(bounds, floor)
    kept = least <= algorithm.tau <= math.ceil(TOO_MUCH * wanted)
    return algorithm.tau if kept else wanted, way.reason(wanted, floor, bounds)


def with_fragments(algorithm: Algorithm, P: int) -> Algorithm:
    if not isinstance(algorithm, Fragmented):
        return algorithm
    return replace(algorithm, tau=max(algorithm.tau, P), fragments=P)


def candidates(algorithm: Algorithm, topology: Topology, allowed: Allowed) -> list[int]:
    """From many to one: of each shortest flight the most fragments; stable on this graph."""
    tau = algorithm.tau
    if allowed.fragments is not None or not in_parts(algorithm):
        return [algorithm.P]
    found = []
    for P in sorted({tau // steps for steps in range(1, tau + 1)}, reverse=True):
        try:
            with_fragments(algorithm, P).check(topology)
        except UserError:  # xoldsgd's gamma, with as many fragments
            continue
        found.append(P)
    return found or [1]


def kinds(algorithm: Algorithm, topology: Topology) -> set[str]:
    """What a round sends: exchange, all_reduce."""
    transport = StackedTransport(topology, Clock(topology.n))
    run(algorithm, algorithm.tau, transport, 2)
    return {record.kind for record in transport.records}


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
