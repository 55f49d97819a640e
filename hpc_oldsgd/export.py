"""The mean model of a run as a plain state_dict: python -m hpc_oldsgd.export RUN model.safetensors

It is summed over the agents in the order of the run's own average, so it is the very model that
the run measured; a few buffers of one model at a time are in memory, however many agents there are.
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import cli, tasks
from .checkpoints import store
from .checkpoints.mean import mean_state_dict
from .checkpoints.store import Checkpoint
from .errors import UserError
from .files import read_regular, replacing
from .tasks import Task
from .training.evaluation import MeanModel

PROG = "hpc_oldsgd.export"


@dataclass(kw_only=True)
class Options:
    """Write the mean model of a run's newest valid checkpoint, with the model's own names."""

    run: cli.Positional[Path]
    """A run's folder, or one of its checkpoints."""
    out: cli.Positional[Path]
    """The file to write."""
    overwrite: bool = False
    """Replace the file if it is there."""
    evaluate: bool = False
    """Load the file into the run's model and measure it on the test set."""


def newest(run: Path, say: typing.Callable[[str], None]) -> Checkpoint:
    """A run's newest checkpoint with every part intact."""
    if not run.is_dir():
        raise UserError(f"there is no run {run}")
    found = store.choose(run, lambda f: list(range(f.count)), lambda text: [text], say)
    if found is None:
        raise UserError(f"{run} has no checkpoint")
    return found


def task_of(run: Path) -> tuple[Task, Any]:
    """The task a run was started with, and what it did with buffers."""
    try:
        config = json.loads(read_regular(run / "config.json"))
        told = dict(config["task"])
        kind = tasks.registry()[told.pop("name")]
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            if told.get(field.name) is not None and Path in typing.get_args(hints[field.name]):
                told[field.name] = Path(told[field.name])
        return kind(**told), config["options"]["buffers"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"cannot tell the task from {run / 'config.json'}: {why}") from None


def main(options: Options) -> None:
    if options.out.exists() and not options.overwrite:
        raise UserError(f"{options.out} exists: add --overwrite to replace it")
    found = newest(options.run, lambda text: print(f"{PROG}: {text}", flush=True))
    state = mean_state_dict(found)
    run = store.run_of(options.run)
    if found.manifest["bn"] == "recalibrate":
        state = recalibrated(state, *task_of(run))
    try:
        with replacing(options.out) as temporary:
            save_file({k: t.contiguous() for k, t in state.items()}, temporary)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {options.out}: {error}") from None
    entries = sum(t.numel() for t in state.values())
    print(
        f"{options.out}: the mean of {found.manifest['run']['agents']} agents after "
        f"{found.manifest['iteration']} iterations, {len(state)} tensors, {entries:,} numbers"
    )
    if options.evaluate:
        task, _ = task_of(run)
        model = task.model()
        model.load_state_dict(load_file(options.out))
        print("\n".join(f"  {k} {v:.4f}" for k, v in task.evaluate(model).items()))


def recalibrated(state: dict[str, Tensor], task: Task, buffers: Any) -> dict[str, Tensor]:
    """With the BatchNorm statistics that a run with --bn recalibrate measures its mean model by."""
    model = task.model()
    model.load_state_dict(state)
    mean = MeanModel(task, model, buffers, True)
    mean.recalibrate()
    return {k: t.detach().clone() for k, t in mean.model.state_dict().items()}


if __name__ == "__main__":
    cli.run(main, Options, prog=PROG)
