"""The same run in one process and in simulated time: python -m hpc_oldsgd.simulate

`trajectory` does it for a gradient function of one's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import cli
from .algorithms import Algorithm
from .checkpoints.writer import Checkpoints
from .cli.console import Console, summary_lines
from .errors import Diverged
from .runs import folder as run_folder
from .runs import resume, session
from .simulation.clock import Clock
from .simulation.stacked import StackedTransport
from .simulation.swarm import Swarm
from .simulation.trajectory import Trajectory, trajectory
from .simulation.vmap_gradients import Together
from .tasks import Task, seed_model
from .training.loop import Training, Worker
from .training.options import SimulateOptions
from .training.signals import Inbox

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
        topology = session.make_topology(config, n)
        session.check_late(config, algorithm, topology)
        speed = np.array(config.speeds())
        clock = Clock(n, config.c, speed, config.jitter, config.degree_aware, config.seed)
        self.tuned = ""
        if config.auto_tau:
            algorithm, self.tuned = session.tau_for_c(config, algorithm, topology)
        self.alpha = config.alpha or task.default_alpha
        self.iterations = config.iterations or task.default_iterations
        shards = [task.shard(i, n, config.partition, config.seed) for i in range(n)]
        models = []
        for _ in range(n):  # everybody starts from the same model, as rank 0's over MPI
            seed_model(config.seed)
            models.append(session.make_model(task))
        optimizers = [config.make_optimizer(model, self.alpha) for model in models]
        wire = config.wire_dtype(next(models[0].parameters()).dtype)
        transport = StackedTransport(topology, clock, wire, config.late_policy())
        self.swarm = Swarm(models, optimizers, algorithm, transport, buffers=config.buffers)
        workers = [Worker(i, models[i], optimizers[i], shards[i]) for i in range(n)]
        self.training = Training(config, task, self.swarm, workers, self.iterations, **hooks)
        if config.gradients == "together":
            self.training.together = Together(task, workers)
        self.topology = topology
        self.title = (
            f"{algorithm.name}, {topology.name}, n = {n}, tau = {algorithm.tau}, "
            f"c = {config.c:g}, alpha = {self.alpha:g}, {task.name}, {config.partition}"
        )

    def run(self) -> list[dict[str, Any]]:
        if not self.swarm.started:
            self.swarm.start()
        rows = self.training.run()
        self.swarm.finish()
        return rows


def main() -> None:
    with cli.guard(PROG):
        argv = sys.argv[1:]
        if "all" in cli.values_of(argv, "algorithm"):
            from .study.compare import compare

            compare(argv)
            return
        config, algorithm, task = session.read_options(SimulateOptions, PROG)
        signals = Inbox(config.on_signal)
        signals.install()
        run(config, algorithm, task, signals)


def run(
    config: SimulateOptions,
    algorithm: Algorithm,
    task: Task,
    signals: Inbox | None = None,
    console: Console | None = None,
) -> Path:
    if config.threads:
        torch.set_num_threads(config.threads)
    console = console or Console(PROG)
    simulation = Simulation(
        config, algorithm, task, on_step=console.step, say=console.say, signals=signals
    )
    swarm, training = simulation.swarm, simulation.training
    model = swarm.models[0]
    who = resume.identity("simulate", config, algorithm, task, simulation.topology, model)
    resume.claim(config)
    plan, overwrite = resume.plan(
        config, who, config.agents, lambda found: list(range(found.count)), lambda text: [text],
        console.say,
    )  # fmt: skip
    resume.take_mean(plan, *swarm.models, training.mean.model)
    state = resume.read(plan, 0, model)
    history = plan.prepare(overwrite)  # last, so that nothing refused has cost anything
    folder = run_folder.RunFolder(plan.path, config.tensorboard, history)
    session.write_config(
        folder, config, swarm.algorithm, task, agents=config.agents, alpha=simulation.alpha,
        iterations=simulation.iterations, topology=session.describe_topology(simulation.topology),
    )  # fmt: skip
    print(f"{PROG}: {simulation.title}; {swarm.x.shape[1]:,} parameters", flush=True)
    if simulation.tuned:
        console.say(simulation.tuned)
    console.start(simulation.iterations)
    training.on_row = session.on_row(console, folder)
    training.rows += history
    about = session.about(who, config, simulation.alpha, model, swarm.flats[0])
    training.checkpoints = Checkpoints(
        plan.path, swarm.transport, training.control, session.policy(config), shard=0, count=1,
        about=about, before_commit=folder.sync,
    )  # fmt: skip
    resume.load(training, plan, state, simulation.alpha, console.say)
    ended = None
    try:
        simulation.run()
    except Diverged as error:
        ended = error
    console.close()
    if ended is None and not training.stopped:
        summary = session.summarise(training.rows, task, simulation.title, "units")
        console.warn(folder.summary(summary))
        print(summary_lines(summary, plan.path), flush=True)
    folder.close()
    session.check_end(training, ended, plan.path)
    return plan.path


if __name__ == "__main__":
    main()
