"""Those of benchmarks.peers, and more of ours; oldsgd and moldsgd have the plan of --auto too."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpc_oldsgd import OLDSGD, Agent, make_plan
from hpc_oldsgd.algorithms import MOLDSGD, Algorithm
from hpc_oldsgd.training.plan import Plan

from ..peers.entries import ENTRIES, Entry, Steps, agent_steps, ours
from ..peers.load import Load

AUTO = "oldsgd-auto"
PLANNED: dict[str, type[Algorithm]] = {AUTO: OLDSGD, "moldsgd-auto": MOLDSGD}
MORE = [
    Entry("diloco", ours("diloco"), ours=True, blocking=True),
    Entry("xoldsgd, P = tau", ours("xoldsgd", in_fragments=True), "ring", ours=True),
    Entry("moldsgd, P = tau", ours("moldsgd", in_fragments=True), "ring", ours=True),
]


def no_plan(load: Load, tau: int) -> Steps:
    raise RuntimeError("start() makes the plan first")


AUTOS = [Entry(name, no_plan, "auto", ours=True) for name in PLANNED]
CONTESTANTS = {e.name: e for e in [*AUTOS, *ENTRIES, *MORE]}


def needs_tau(entry: Entry) -> bool:
    """Talks every tau steps, with a tau that somebody must choose."""
    return not entry.every_step and entry.name not in PLANNED


@dataclass(frozen=True)
class Started:
    """A contestant at its first step."""

    steps: Steps
    tau: int
    said: str = ""
    before_s: float = 0.0
    """What was done before the clock started."""


def start(entry: Entry, load: Load, tau: int) -> Started:
    """Collective. The load is fresh."""
    kind = PLANNED.get(entry.name)
    if kind is None:
        tau = tau if needs_tau(entry) else 1
        return Started(entry.steps(load, tau), tau)
    begin = time.perf_counter()
    plan = make_plan(load.model, lambda k: load.gradient(), kind())
    took = time.perf_counter() - begin
    load.fresh()
    said = f"{plan.topology}, {plan.wire}, tau = {plan.tau}, P = {plan.fragments}"
    return Started(planned(load, plan, kind()), plan.tau, said, took)


def planned(load: Load, plan: Plan, algorithm: Algorithm) -> Steps:
    agent = Agent(load.model, load.optimizer, plan.apply(algorithm), plan.topology, wire=plan.wire,
                  sync=True)  # fmt: skip
    yield from agent_steps(load, agent)
