"""What `train` would refuse at its start, found by one process without MPI: train --check. The same
for the runs of `simulate` that jobs/compare.slurm starts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import algorithms, cli
from ..launch.launcher import launcher_size
from ..runtime.flat import check_trainable
from ..simulation.slowdown import slowdowns
from ..tasks import seed_model
from ..training.options import SimulateOptions, TrainOptions
from ..training.plan import size_of
from . import folder, resume
from .identity import identity
from .spec import Spec, check_train, make_graphs, make_topology, parse


def check(spec: Spec[TrainOptions]) -> str:
    """One line about the run that would start. Raises UserError. Writes nothing."""
    options, task = spec.options, spec.task
    sizes = options.check_agents or size_of_job()
    seed_model(options.seed)
    model = task.model()
    check_trainable(model)
    options.make_optimizer(model, spec.alpha)
    for n in sizes or [1]:
        for i in range(n):
            task.shard(i, n, options.partition, options.seed)
    task.train_sample(options.eval_samples)
    task.test_set(options.eval_samples)
    for n in sizes:
        if spec.plan is not None:
            spec.plan.check(n, spec.algorithm.name, size_of(model))
        for topology in make_graphs(options, n).values():
            spec.check(topology)
            check_train(options, spec.algorithm, topology)
        own = identity("train", spec, topology, model)
        plan = resume.make_plan(
            options, own, n, lambda found: [], lambda text: [text], lambda text: None
        )
        folder.check(plan.path, plan.overwrite, resume=plan.here)
    agents = ", ".join(map(str, sizes)) or "any number (--check-agents N checks the graph too)"
    d = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        f"good: {task.name} with {task.count():,} training samples and {d:,} parameters, "
        f"{spec.algorithm.name}, {options.topology}, agents: {agents}"
    )


def check_simulated(names: Sequence[str], words: Sequence[str]) -> None:
    """Ends with one line and exit code 2 if `simulate` would refuse these words with one of the
    algorithms; all of them where none is named. Those that cannot take this tau are left out."""
    prog, seen = "hpc_oldsgd.simulate", False
    with cli.guard(prog):
        tau = int(cli.values_of(words, "tau")[0])
        for name in names or algorithms.names():
            if not algorithms.with_tau(name, tau):
                continue
            spec = parse(SimulateOptions, prog, ["--algorithm", name, *words])
            options, task = spec.options, spec.task
            topology = make_topology(options, options.agents)
            spec.check(topology)
            slowdowns(options.slow, topology.n)
            if seen:  # the rest is the same for all
                continue
            seen = True
            seed_model(options.seed)
            model = task.model()
            check_trainable(model)
            options.make_optimizer(model, spec.alpha)
            for i in range(topology.n):
                task.shard(i, topology.n, options.partition, options.seed)
            task.train_sample(options.eval_samples)
            task.test_set(options.eval_samples)


def size_of_job() -> Sequence[int]:
    """As the launcher or Slurm says; nothing on a login node."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    n = launcher_size()
    return [n] if n > 1 else [int(tasks)] if tasks.isdecimal() and int(tasks) else []
