"""Accuracy against real seconds on a slow network: python -m benchmarks.accuracy (root).

All train the same model from the same start on the same batches, and nothing else happens in the
meantime: each rank only copies its model aside now and then. When a run is over, the copies are
averaged over the ranks and the mean models are measured on the test set.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hpc_oldsgd import cli, tasks, topology
from hpc_oldsgd.data import seed_model
from hpc_oldsgd.errors import UserError

from .launch import launch, rate, slow_net_works
from .peers.entries import ENTRIES, Entry, alone


@dataclass(frozen=True)
class Options:
    """Time to accuracy of oldsgd, ldsgd, lsgd and DDP over links of known speed."""

    task: str = "digits"
    """Model and data: digits or cifar10-vgg11."""
    entry: tuple[str, ...] = ("oldsgd", "ldsgd", "lsgd", "ddp")
    """Contestants, by their names in benchmarks.peers."""
    ranks: int = 9
    """Agents."""
    ratio: float = 2.5
    """How many gradients long one message is on the link; at 2.5 a ring's two fill five of them."""
    iterations: int = 600
    """Gradients of each agent."""
    limit: float = 60.0
    """Seconds after which a contestant stops, finished or not."""
    tau: int = 5
    """Local steps a round."""
    batch: int = 8
    """Samples a step and agent."""
    alpha: float = 0.0
    """Step size; the task's own if 0."""
    momentum: float = 0.0
    """Momentum of SGD."""
    points: int = 20
    """Measured models of each."""
    target: tuple[float, ...] = (0.95,)
    """Test accuracies whose times are reported."""
    test_samples: int = 2000
    """Size of the fixed sample of the test set."""
    output: Path | None = None
    """Folder for accuracy-TASK.json and accuracy-TASK.png."""
    worker: bool = False
    """Set by the command itself: one rank."""
    calibrate: bool = False
    """Set by the command itself: only time the gradient."""

    def __post_init__(self) -> None:
        known = [e.name for e in ENTRIES]
        for name in self.entry:
            if name not in known:
                raise UserError(f"There is no {name}; known are {'; '.join(known)}.")
        if min(self.ranks - 1, self.iterations, self.tau, self.batch, self.points) < 1:
            raise UserError("--ranks must be at least 2, all other numbers at least 1.")


class TaskLoad:
    """What `peers.entries` trains: a task's model on this rank's share of the data."""

    real = True
    at_once = False

    def __init__(self, options: Options, rank: int) -> None:
        self.task = tasks.get(options.task)(batch=options.batch)
        self.alpha = options.alpha or self.task.default_alpha
        self.momentum = options.momentum
        self.shard = self.task.shard(rank, options.ranks)
        self.fresh()

    def fresh(self) -> None:
        seed_model(0)
        self.k = 0
        self.model = self.task.model()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=self.alpha, momentum=self.momentum
        )

    def gradient(self, model: nn.Module | None = None) -> None:
        self.task.loss(self.model if model is None else model, self.shard.batch(self.k)).backward()
        self.k += 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def main(options: Options) -> None:
    if options.worker:
        rank(options)
        return
    if not slow_net_works():
        raise UserError("This needs a slow network of its own: root, tc and network namespaces.")
    given = []
    for name, value in vars(options).items():
        if name not in ("output", "worker", "calibrate"):
            words = map(str, value) if isinstance(value, tuple) else [str(value)]
            given += [f"--{name.replace('_', '-')}", *words]
    # How long a gradient takes beside the other ranks decides what a slow network is.
    first = launch("benchmarks.accuracy", [*given, "--worker", "--calibrate"], options.ranks)
    network = rate(first["bytes"], options.ratio * first["t_g"])
    burst = "256kb" if first["bytes"] > 4e6 else "16kb"
    result = launch("benchmarks.accuracy", [*given, "--worker"], options.ranks, network, burst)
    print(table(result))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        stem = options.output / f"accuracy-{options.task}"
        stem.with_suffix(".json").write_text(json.dumps(result) + "\n")
        figure([result], stem)


# -- one rank --------------------------------------------------------------------------------------


def rank(options: Options) -> None:
    from hpc_oldsgd.transport.mpi import MpiTransport, world

    from .peers.worker import join_gloo

    comm = world()
    torch.set_num_threads(1)
    idle = MpiTransport(comm, topology.from_name("ring", comm.size))
    join_gloo(idle)
    load = TaskLoad(options, comm.rank)
    load.shard.batch(0)
    parameters = sum(p.numel() for p in load.model.parameters())
    t_g = float(idle.reduce(np.array([_t_g(load, idle)]), "max").result()[0])
    about: dict[str, Any] = {"t_g": t_g, "bytes": 4 * parameters}
    if not options.calibrate:
        runs = []
        for name in options.entry:
            entry = next(e for e in ENTRIES if e.name == name)
            runs.append(curve(options, entry, load, idle))
            if comm.rank == 0:
                last = f"{name}: {runs[-1]['accuracy'][-1]:.3f} after {runs[-1]['time'][-1]:.1f} s"
                print(last, file=sys.stderr, flush=True)
        about |= {"runs": runs, "network": os.environ.get("HPC_OLDSGD_SLOW_NET", "")}
        about["options"] = {k: v for k, v in vars(options).items() if k != "output"}
    idle.close()
    dist.destroy_process_group()
    if comm.rank == 0:
        print(json.dumps(about))


def _t_g(load: TaskLoad, idle: Any, steps: int = 8) -> float:
    """Median seconds of a step while all ranks compute and nothing is sent."""
    load.fresh()
    turns, times = alone(load, 1), []  # type: ignore[arg-type]
    next(turns)
    idle.reduce(np.zeros(1)).result()
    for _ in range(steps):
        start = time.perf_counter()
        next(turns)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def curve(options: Options, entry: Entry, load: TaskLoad, idle: Any) -> dict[str, Any]:
    """Train; then the accuracies of the mean models that were put aside."""
    load.fresh()
    every = max(1, round(options.iterations / options.points / options.tau)) * options.tau
    kept: list[tuple[int, float, torch.Tensor]] = []
    steps = entry.steps(load, options.tau)  # type: ignore[arg-type]
    idle.reduce(np.zeros(1)).result()
    start = time.perf_counter()
    kept.append((0, 0.0, _flat(load.model)))
    vote = idle.reduce(np.zeros(1), "max")
    for t in range(1, options.iterations + 1):
        next(steps)
        if t % every == 0:
            now = time.perf_counter() - start
            kept.append((t, now, _flat(load.model)))
            # All stop together, one point after the limit, and nobody waits for the vote.
            if vote.result()[0] > options.limit:
                break
            vote = idle.reduce(np.array([now]), "max")
    steps.close()  # type: ignore[attr-defined]
    result: dict[str, Any] = {"entry": entry.name, "iteration": [], "time": [], "accuracy": []}
    for t, now, x in kept:
        mean = idle.all_reduce(x, 0).mean(torch.empty_like(x))
        when = float(idle.reduce(np.array([now]), "max").result()[0])
        accuracy = 0.0
        if idle.rank == 0:
            nn.utils.vector_to_parameters(mean, load.model.parameters())
            numbers = load.task.evaluate(load.model, "test", options.test_samples)
            accuracy = numbers["test_accuracy"]
        result["iteration"].append(t)
        result["time"].append(when)
        result["accuracy"].append(accuracy)
    return result


def _flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# -- the report ------------------------------------------------------------------------------------


def reached(run: dict[str, Any], target: float) -> float | None:
    """Seconds to the target, between the two points around it."""
    points = list(zip(run["time"], run["accuracy"], strict=True))
    for (t0, a0), (t1, a1) in itertools.pairwise(points):
        if a1 >= target:
            return t1 if a1 == a0 else t0 + (t1 - t0) * max(0.0, (target - a0) / (a1 - a0))
    return None


def table(result: dict[str, Any]) -> str:
    o = result["options"]
    ours = next((run for run in result["runs"] if run["entry"] == "oldsgd"), None)
    heads = [f"s to {100 * target:g}% | oldsgd is faster" for target in o["target"]]
    lines = [
        f"{o['task']}, {o['ranks']} agents, tau {o['tau']}, batch {o['batch']}, "
        f"{result['bytes'] / 1e6:.2f} MB, gradient {result['t_g']:.3f} s, links of "
        f"{result['network']}: a message takes {o['ratio']:g} gradients",
        "",
        f"| | {' | '.join(heads)} | s a step | at the end |",
        "| --- " * (3 + 2 * len(heads)) + "|",
    ]
    for run in result["runs"]:
        cells = [shown(run, ours, target) for target in o["target"]]
        lines.append(
            f"| {run['entry']} | {' | '.join(cells)} "
            f"| {run['time'][-1] / run['iteration'][-1]:.3f} "
            f"| {run['accuracy'][-1]:.3f} after {run['iteration'][-1]} steps |"
        )
    return "\n".join(lines)


def shown(run: dict[str, Any], ours: dict[str, Any] | None, target: float) -> str:
    """Two cells: seconds to the target, and how much sooner OLDSGD was there."""
    s, own = reached(run, target), None if ours is None else reached(ours, target)
    if s is None:
        return f"not in {run['time'][-1]:.0f} |"
    return f"{s:.1f} | {'' if own is None or run is ours else f'{s / own:.2f}x'}"


def figure(results: list[dict[str, Any]], stem: Path) -> None:
    from hpc_oldsgd.plot import style

    with style.figure(stem, ("png",), height=2.6) as fig:
        axes = fig.subplots(1, len(results), squeeze=False)[0]
        for ax, result in zip(axes, results, strict=True):
            for k, run in enumerate(result["runs"]):
                ax.plot(run["time"], run["accuracy"], label=run["entry"], **style.line(k))
            o = result["options"]
            for target in o["target"]:
                ax.axhline(target, color=style.GREY, linewidth=0.8)
            ax.set_title(f"{o['task']}, {o['ranks']} agents, message {o['ratio']:g} gradients")
            ax.set(xlabel="seconds", ylabel="test accuracy of the mean model")
            ax.legend(loc="lower right")


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.accuracy")
