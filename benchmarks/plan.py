"""Is the plan of --auto a good one? python -m benchmarks.plan (root).

Digits on a slow network. Seconds to the target are iterations to it times seconds of an iteration.
The seconds are those of real runs over MPI, one after the other in one job on each link: the plan
that `make_plan` finds there, and a grid. The iterations come from the simulator, whose iterates are
those of the runs over MPI: so measuring the mean model costs the runs nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from hpc_oldsgd import Agent, cli, make_plan, tasks
from hpc_oldsgd.algorithms import OLDSGD
from hpc_oldsgd.data import seed_model
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.runs.backend import Stacked
from hpc_oldsgd.runs.session import Session
from hpc_oldsgd.training.options import SimulateOptions

from .launch import launch, rate, require_slow_net, start_rank

Cell = tuple[str, str, int, int]  # graph, wire, tau, fragments
GRAPHS, WIRES = ("ring", "exponential", "one-peer-exponential"), ("same", "int4")
ROUNDS = ((1, 1), (4, 1), (4, 4), (16, 1), (16, 16))
CLOSEST, FASTER = ("exponential", "same", 1, 1), 0.9
WARM_UP = 2  # rounds; the first message of a narrow wire is whole


@dataclass(frozen=True)
class Options:
    """Time to a target of the plan that --auto makes, beside a grid of plans, on slow links."""

    ratio: tuple[float, ...] = (0.2, 1.0, 5.0)
    """How many gradients long one fp32 message is on each link; a ring sends two."""
    ranks: int = 4
    """Agents."""
    grad_seconds: float = 0.02
    """A gradient of digits and then a sleep, as if a device computed."""
    seconds: float = 2.0
    """How long each plan runs on each link, about."""
    loss: float = 0.3
    """The target: the training loss of the mean model."""
    iterations: int = 240
    """Gradients after which a plan counts as never there."""
    seed: tuple[int, ...] = (0,)
    """Over which the iterations are averaged."""
    worker: bool = False
    """Set by the command itself: one rank."""


def grid() -> list[Cell]:
    return [(g, w, *r) for g, w, r in itertools.product(GRAPHS, WIRES, ROUNDS)]


def main(options: Options) -> None:
    if options.worker:
        rank(options)
        return
    require_slow_net()
    given = ["--worker", "--grad-seconds", options.grad_seconds, "--seconds", options.seconds]
    nbytes = 4 * sum(p.numel() for p in tasks.get("digits")().model().parameters())
    print(
        f"digits, {options.ranks} agents, {nbytes / 1e3:.0f} kB, gradient "
        f"{options.grad_seconds:g} s, to a loss of {options.loss:g}, {len(grid())} plans\n"
    )
    print("| message / gradient | plan of --auto | s to target | best of the grid | s | ratio |")
    print("| --- " * 6 + "|", flush=True)
    for ratio in options.ratio:
        link = rate(nbytes, ratio * options.grad_seconds)
        result = launch("benchmarks.plan", given, options.ranks, link, "16kb")
        found: Cell = tuple(result["plan"])
        took = to_target(options, {tuple(cell): s for *cell, s in result["cells"]}, found)
        best = min((cell for cell in took if cell != found), key=lambda cell: took[cell])
        print(
            f"| {ratio:g} | {named(found)} | {took[found]:.2f} | {named(best)} | {took[best]:.2f} "
            f"| {took[found] / took[best]:.3f} |",
            flush=True,
        )


def to_target(options: Options, step_s: dict[Cell, float], plan: Cell) -> dict[Cell, float]:
    """Seconds of the plan and of those that could be the best: nobody learns much faster than
    agents that mix all models after every step."""
    least = FASTER * learned(options, *CLOSEST)
    took = {plan: step_s[plan] * learned(options, *plan)}
    for cell in sorted(step_s, key=lambda cell: step_s[cell]):
        if cell not in took and step_s[cell] * least < min(took.values()):
            took[cell] = step_s[cell] * learned(options, *cell)
        told = f"{took.get(cell, math.nan):.2f} s, {1e3 * step_s[cell]:.1f} ms an iteration"
        print(f"{named(cell)}: {told}", file=sys.stderr, flush=True)
    if not math.isfinite(min(took.values())):
        raise UserError("No plan reached the target: take more --iterations.")
    return took


def named(cell: Cell) -> str:
    return "{}, {}, tau = {}, P = {}".format(*cell)


@cache
def learned(options: Options, graph: str, wire: str, tau: int, P: int) -> float:
    """Iterations to the target, between the two rows around it; the mean over the seeds."""
    needed = []
    for seed in options.seed:
        words = (
            f"--topology {graph} --wire {wire} --tau {tau} --fragments {P} --seed {seed} "
            f"--agents {options.ranks} --iterations {options.iterations} --gradients together "
            f"--eval-every {max(1, 10 // tau)} --eval-samples 500 --no-final-test --threads 1"
        )
        asked = spec.parse(SimulateOptions, "benchmarks.plan", words.split())
        rows = Session(asked, Stacked(asked.options), in_folder=False).run()
        needed.append(crossing(rows, options.loss))
    return sum(needed) / len(needed)


def crossing(rows: list[dict[str, Any]], target: float) -> float:
    for a, b in itertools.pairwise(rows):
        if b["train_loss"] <= target:
            share = math.log(a["train_loss"] / target) / math.log(a["train_loss"] / b["train_loss"])
            return float(a["iteration"] + share * (b["iteration"] - a["iteration"]))
    return math.inf


# -- one rank --------------------------------------------------------------------------------------


def rank(options: Options) -> None:
    comm, idle = start_rank()
    task = tasks.get("digits")()
    shard = task.shard(comm.rank, comm.size)
    seed_model(0)
    model = task.model()

    def gradient(k: int) -> None:
        until = time.perf_counter() + options.grad_seconds
        task.loss(model, shard.batch(k)).backward()
        time.sleep(max(0.0, until - time.perf_counter()))

    plan = make_plan(model, gradient)
    found: Cell = (plan.topology, plan.wire, plan.tau, plan.fragments)
    if comm.rank == 0:
        network = os.environ.get("HPC_OLDSGD_SLOW_NET", "")
        print(f"{network}: {named(found)}: {plan.reason}", file=sys.stderr, flush=True)
    cells = []
    for cell in dict.fromkeys([found, *grid()]):
        seed_model(0)
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=task.default_alpha)
        graph, wire, tau, P = cell
        agent = Agent(model, optimizer, OLDSGD(tau=tau, fragments=P), graph, wire=wire)
        cells.append([*cell, step_seconds(agent, gradient, idle, options.seconds)])
        agent.finish()
    idle.close()
    if comm.rank == 0:
        print(json.dumps({"plan": found, "cells": cells}))


def step_seconds(agent: Agent, gradient: Any, idle: Any, about_s: float) -> float:
    """Of the slowest rank, after the first rounds."""

    def timed(rounds: int) -> float:
        start = idle.barrier()
        for _ in range(rounds * agent.algorithm.tau):
            agent.optimizer.zero_grad()
            gradient(agent.t)
            agent.step()
        own = (time.perf_counter() - start) / rounds
        return float(idle.reduce(np.array([own]), "max").result()[0])

    once = timed(WARM_UP)
    return timed(max(3, round(about_s / once))) / agent.algorithm.tau


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.plan")
