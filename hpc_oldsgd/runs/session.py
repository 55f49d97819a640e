"""What `train` and `simulate` share: reading the options, the run's folder, its summary."""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from .. import algorithms, cli, tasks
from .. import topology as topologies
from ..algorithms import Algorithm
from ..checkpoints.mean import layout
from ..checkpoints.writer import Policy
from ..cli.console import Console
from ..errors import Diverged, Stopped, UserError
from ..runtime.flat import Flat, check_trainable
from ..tasks import Task
from ..topology import Topology
from ..training import tau_auto
from ..training.loop import Training
from ..training.options import RunOptions, SimulateOptions
from ..training.window import hidden
from ..transport.late import NO_EDGES
from .folder import RunFolder, environment

O = TypeVar("O", bound=RunOptions)  # noqa: E741  options


def read_options(kind: type[O], prog: str) -> tuple[O, Algorithm, Task]:
    return parse_options(kind, prog, sys.argv[1:])


def parse_options(kind: type[O], prog: str, argv: list[str]) -> tuple[O, Algorithm, Task]:
    words, auto = tau_auto.take(argv)
    config, chosen = cli.parse_staged(
        kind,
        {"algorithm": algorithms.registry(), "task": tasks.registry()},
        words,
        prog=prog,
    )
    if auto:
        config.auto_tau = auto
    elif getattr(config, "retune", 0):
        raise UserError("--retune changes tau during the run: add --tau auto")
    return config, chosen["algorithm"], chosen["task"]


def make_topology(config: RunOptions, n: int) -> Topology:
    """By name, or from a file where the name is one."""
    path = Path(config.topology)
    if path.suffix and path.is_file():
        topology = topologies.from_file(path)
        if topology.n != n:
            raise UserError(f"{path} is a graph of {topology.n} agents, not {n}")
        return topology
    return topologies.from_name(config.topology, n, weights=config.weights)


def tau_for_c(
    config: SimulateOptions, algorithm: Algorithm, topology: Topology
) -> tuple[Algorithm, str]:
    """What --tau auto means where c is known; gradients that vary ask for the margin."""
    choice = tau_auto.choose(
        algorithm, topology, config.c, tau_auto.Bounds.parse(config.auto_tau),
        margin=tau_auto.MARGIN if config.jitter else 1.0,
        speed=np.array(config.speeds()), degree_aware=config.degree_aware,
    )  # fmt: skip
    chosen = dataclasses.replace(algorithm, tau=choice.tau)
    return chosen, f"tau = {choice.tau} chosen: {choice.reason}"


def check_late(config: RunOptions, algorithm: Algorithm, topology: Topology) -> None:
    if config.late_policy() is not None and "all_reduce" in tau_auto.kinds(algorithm, topology):
        raise UserError(NO_EDGES)


def make_model(task: Task, device: torch.device | str = "cpu") -> nn.Module:
    """The task's, seeded by the caller; refused before an optimizer trips over it."""
    model = task.model()
    check_trainable(model)
    return model.to(device)


def describe_topology(topology: Topology) -> dict[str, Any]:
    return {"name": topology.name, "lambda_2": topology.lambda_2, "p": topology.p}


def folder_for(config: RunOptions, n: int) -> Path:
    if config.out is not None:
        return config.out
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{config.task}-{config.algorithm}-{config.topology.replace('/', '_')}-n{n}"
    path = Path("runs") / name
    k = 2
    while path.exists():
        path = Path("runs") / f"{name}-{k}"
        k += 1
    return path


def write_config(
    folder: RunFolder, config: RunOptions, algorithm: Algorithm, task: Task, **more: Any
) -> None:
    content = {
        "options": dataclasses.asdict(config),
        "algorithm": {"name": algorithm.name, **algorithm.options()},
        "task": {"name": task.name, **dataclasses.asdict(task)},
        **more,
        "environment": environment(),
    }
    try:
        folder.write("config.json", content)
    except OSError as error:
        folder.close()
        raise UserError(f"cannot write to {folder.path}: {error.strerror}") from None


def policy(config: RunOptions) -> Policy:
    return Policy(config.checkpoint_every, config.checkpoint_seconds, config.keep)


def about(
    who: dict[str, Any], config: RunOptions, alpha: float, model: nn.Module, flat: Flat
) -> dict[str, Any]:
    """What a checkpoint's manifest says of its run."""
    return {"run": who, "alpha": alpha, "bn": config.bn, "layout": layout(model, flat)}


def on_row(console: Console, folder: RunFolder | None) -> Callable[[dict[str, Any]], None]:
    """Shows a row and, where the folder is, writes it."""

    def take(row: dict[str, Any]) -> None:
        console.row(row)
        if folder is not None:
            folder.row(row)
            console.warn(folder.problem)

    return take


def check_end(training: Training, ended: Diverged | None, path: Path) -> None:
    """Raises what the exit code is to say; the same on every rank."""
    if ended is not None:
        raise ended
    if training.stopped:
        runner, keeper = training.runner, training.checkpoints
        saved = keeper.last.name if keeper is not None and keeper.last is not None else "none"
        raise Stopped(
            f"stopped by a signal after iteration {runner.t} of {training.iterations}, the last "
            f"checkpoint is {saved}: go on with --resume auto --out {path}"
        )


def summarise(rows: list[dict[str, Any]], task: Task, title: str, time_unit: str) -> dict[str, Any]:
    """The last row, with what only the whole run tells."""
    last = dict(rows[-1])
    last.pop("agent_loss", None)
    name, direction = task.primary
    values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
    best = (max if direction == "max" else min)(values) if values else math.nan
    waited = [row for row in rows if row["hidden"] is not None and row["transfer"] > 0]
    transfer = sum(row["transfer"] for row in waited)
    exposed = sum(row["exposed"] for row in waited)
    steps = sorted(row["step_s"] for row in rows[1:] or rows)
    return {
        "title": title,
        **last,
        "primary": name,
        "best": best,
        "transfer": transfer / len(waited) if waited else 0.0,
        "exposed": exposed / len(waited) if waited else 0.0,
        "hidden": hidden(exposed, transfer),
        "step_s": steps[len(steps) // 2],
        "time_unit": time_unit,
    }
