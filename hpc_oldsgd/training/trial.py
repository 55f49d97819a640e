"""The chosen plan for a few rounds on its real schedule, while gradients are computed.

A message that is measured alone is too short: under gradients nobody starts together, and messages
and gradients share cores. So the plan is tried. If a step takes too long, the rule chooses again
and knows what was seen. The model takes no part but for its gradients: a vector as long as x flies.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..algorithms import Algorithm
from ..runtime.plain import Plain
from ..simulation.slowdown import draw, pause
from ..topology import Topology
from ..transport.device import device_of
from .choose import choose, expected
from .plan import Allowed, Measured, Plan, Tried

if TYPE_CHECKING:
    from ..transport.mpi import MpiTransport, Startup

WARM_UP, STEPS, ROUNDS = 4, 30, 2  # steps; at least so many steps and rounds are timed
ENOUGH_S, MOST = 0.3, 200  # and for as long, if that is not more than so many gradients
LONG_S = 10.0  # no further trial after as many seconds, nor one that would end later
Gradient = Callable[[int], object]
Trial = Callable[[Plan], float]
"""Runs a plan for a few rounds: seconds of a step."""


def settle(
    algorithm: Algorithm,
    graphs: Mapping[str, Topology],
    measured: Measured,
    allowed: Allowed,
    trial: Trial,
) -> tuple[Plan, Measured]:
    """Choose and try, until a plan's steps take as long as they should."""
    begin = time.perf_counter()
    while True:
        plan = choose(algorithm, graphs, measured, allowed)
        graph = graphs[plan.topology]
        if graph.n == 1 or any(one.is_of(plan) for one in measured.tried):
            return plan, measured
        left = LONG_S - (time.perf_counter() - begin)
        should = expected(algorithm, graph, measured, plan)
        if should * plan.tau * sum(rounds_of(plan, graph, measured.gradient)) > left:
            if measured.tried:  # better what was seen than a guess that may be far off
                plan = choose(algorithm, graphs, measured, allowed, tried_only=True)
            return plan, measured
        step = trial(plan)
        cell = (plan.topology, plan.wire, plan.tau, plan.fragments)
        measured = replace(measured, tried=(*measured.tried, Tried(*cell, step, step / should)))


def agreed(startup: Startup, trial: Trial, decide: Callable[[Trial], Plan]) -> Plan:
    """Rank 0 decides, and all take part in its trials: the same plan on all ranks. Collective."""

    def told(plan: Plan | None = None, final: bool = False) -> tuple[Plan, bool]:
        text = "" if plan is None else json.dumps({"plan": plan.as_dict(), "final": final})
        said = json.loads(startup.gather(text)[0])
        return Plan(**said["plan"]), said["final"]

    if startup.comm.rank == 0:
        return told(decide(lambda plan: trial(told(plan)[0])), final=True)[0]
    while True:
        plan, final = told()
        if final:
            return plan
        trial(plan)


def rounds_of(plan: Plan, graph: Topology, gradient: float) -> tuple[int, int]:
    """Of a trial: those that warm up, and those that are timed, in whole periods of the graph."""
    period = graph.period  # in each phase a narrow wire's first message is whole
    # Where ranks share cores, what a short gradient takes depends on who has the core: many count.
    steps = max(STEPS, min(MOST, math.ceil(ENOUGH_S / max(gradient, 1e-9))))
    warm_up, timed = -(-WARM_UP // plan.tau), max(ROUNDS, -(-steps // plan.tau))
    return -(-warm_up // period) * period, -(-timed // period) * period


@dataclass(frozen=True)
class Compute:
    """A rank's gradients, made as slow as is asked for."""

    model: nn.Module
    gradient: Gradient
    count: int
    """Of different gradients that there are."""
    factor: float = 1.0
    jitter: float = 0.0

    def steps(self, transport: MpiTransport) -> Iterator[None]:
        random, k = np.random.default_rng(transport.rank), 0
        device = device_of(next(self.model.parameters()).device)
        while True:
            start = time.perf_counter()
            self.gradient(k % self.count)
            device.synchronize()
            factor = self.factor * float(draw(random, self.jitter, 1)[0])
            pause((time.perf_counter() - start) * (factor - 1), transport.poll)
            k += 1
            yield

    @contextmanager
    def polled(self, transport: MpiTransport) -> Iterator[None]:
        """As an Agent does it, where no thread moves the messages."""
        hooks: list[Any] = []
        if transport.progress == "poll":
            for p in self.model.parameters():
                if p.requires_grad:
                    given: Any = p
                    hooks.append(
                        given.register_post_accumulate_grad_hook(lambda _: transport.poll())
                    )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, gradients and torch's random numbers are then as before, gradients gone."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    yield
    torch.set_rng_state(random)
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)


def step_seconds(
    plan: Plan,
    algorithm: Algorithm,
    transport: MpiTransport,
    x: torch.Tensor,
    compute: Compute,
    gradient: float,
) -> float:
    """Of the slowest rank, without its longest round. Collective; closes the transport.

    `gradient` is what one takes, the same number on all ranks: it says how many are timed.
    """
    warm_up, timed = rounds_of(plan, transport.topology, gradient)
    period = transport.topology.period
    runner = Plain(x.clone(), plan.apply(algorithm), transport, alpha=1e-3)
    marks: list[float] = []
    runner.observers.append(lambda _: marks.append(time.perf_counter()))
    with untouched(compute.model), compute.polled(transport):
        steps = compute.steps(transport)
        transport.reduce(np.zeros(1)).result()  # all start together
        runner.start()
        while runner.r < warm_up + timed:
            next(steps)
            runner.advance(x)
    took = without_longest(np.diff(marks[warm_up::period]).tolist())
    own = float(np.mean(took)) / (period * plan.tau)
    slowest = float(transport.everywhere(own).result().max())
    runner.finish()
    return slowest


def without_longest(took: list[float]) -> list[float]:
    """For a mean: what is late now and then costs a run time, too. But one hiccup is no sign."""
    return sorted(took)[: max(1, len(took) - 1)]
