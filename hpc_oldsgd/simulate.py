"""The same run in one process and in simulated time: python -m hpc_oldsgd.simulate

`trajectory` does it for a gradient function of one's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import cli, metrics, runs
from .algorithms import Algorithm
from .clock import Clock
from .config import SimulateOptions
from .console import Console, summary_lines
from .swarm import Swarm
from .tasks import Task, seed_model
from .training import Training, Worker
from .trajectory import Trajectory, trajectory
from .transport.stacked import StackedTransport

__all__ = ["Simulation", "Trajectory", "main", "trajectory"]

PROG = "hpc_oldsgd.simulate"


class Simulation:
    """All agents of a run, ready to go; studies make many of them."""

    def __init__(
        self,
        config: SimulateOptions,
        algorithm: Algorithm,
        task: Task,
        **hooks: Any,
    ) -> None:
        n = config.agents
        topology = runs.make_topology(config, n)
        speed = np.array(config.speeds())
        clock = Clock(n, config.c, speed, config.jitter, config.degree_aware, config.seed)
        self.alpha = config.alpha or task.default_alpha
        self.iterations = config.iterations or task.default_iterations
        shards = [task.shard(i, n, config.partition, config.seed) for i in range(n)]
        models = []
        for _ in range(n):  # everybody starts from the same model, as rank 0's over MPI
            seed_model(config.seed)
            models.append(task.model())
        optimizers = [config.make_optimizer(model, self.alpha) for model in models]
        wire = config.wire_dtype(next(models[0].parameters()).dtype)
        transport = StackedTransport(topology, clock, wire)
        self.swarm = Swarm(models, optimizers, algorithm, transport, buffers=config.buffers)
        workers = [Worker(i, models[i], optimizers[i], shards[i]) for i in range(n)]
        self.training = Training(config, task, self.swarm, workers, self.iterations, **hooks)
        self.topology = topology
        self.title = (
            f"{algorithm.name}, {topology.name}, n = {n}, tau = {algorithm.tau}, "
            f"c = {config.c:g}, alpha = {self.alpha:g}, {task.name}, {config.partition}"
        )

    def run(self) -> list[dict[str, Any]]:
        self.swarm.start()
        rows = self.training.run()
        self.swarm.finish()
        return rows


def main() -> None:
    with cli.guard(PROG):
        argv = sys.argv[1:]
        if "all" in cli.values_of(argv, "algorithm"):
            from .compare import compare

            compare(argv)
            return
        config, algorithm, task = runs.read_options(SimulateOptions, PROG)
        run(config, algorithm, task)


def run(config: SimulateOptions, algorithm: Algorithm, task: Task) -> Path:
    if config.threads:
        torch.set_num_threads(config.threads)
    path = runs.folder_for(config, config.agents)
    metrics.prepare(path, config.overwrite)
    console: Console | None = None
    folder: metrics.RunFolder | None = None

    def on_row(row: dict[str, Any]) -> None:
        assert console is not None and folder is not None
        console.row(row)
        folder.row(row)

    def on_step(t: int) -> None:
        assert console is not None
        console.step(t)

    simulation = Simulation(config, algorithm, task, on_row=on_row, on_step=on_step)
    print(f"{PROG}: {simulation.title}; {simulation.swarm.x.shape[1]:,} parameters", flush=True)
    console = Console(simulation.iterations)
    folder = metrics.RunFolder(path, config.tensorboard)
    runs.write_config(
        folder, config, algorithm, task, agents=config.agents, alpha=simulation.alpha,
        iterations=simulation.iterations, topology=runs.describe_topology(simulation.topology),
    )  # fmt: skip
    rows = simulation.run()
    console.close()
    summary = runs.summarise(rows, task, simulation.title, "units")
    folder.write("summary.json", summary)
    folder.close()
    print(summary_lines(summary, path), flush=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
