"""The mean model of a run as a plain state_dict: python -m hpc_oldsgd.export RUN model.safetensors

It is summed over the agents in the order of the run's own average, so it is the very model that
the run measured; a few buffers of one model at a time are in memory, however many agents there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import cli, stored, tasks
from .errors import UserError
from .flat import Flat
from .stored import Checkpoint
from .tasks import Task
from .transport.base import ring_chunks

PROG = "hpc_oldsgd.export"


@dataclass(kw_only=True)
class Options:
    """Write the mean model of a run's newest valid checkpoint, with the model's own names."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, or one of its checkpoints."""
    out: Annotated[Path, tyro.conf.Positional]
    """The file to write."""
    overwrite: bool = False
    """Replace the file if it is there."""
    evaluate: bool = False
    """Load the file into the run's model and measure it on the test set."""


def layout(model: nn.Module, flat: Flat) -> dict[str, Any]:
    """Where a checkpoint holds each entry of the model's state_dict: in x, or by name outside."""
    inside = {id(slot.tensor): slot for slot in flat.slots}
    outside = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    places: dict[str, Any] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        slot = inside.get(id(tensor))
        if slot is None:
            places[key] = outside[id(tensor)]
        else:
            shape, stride = list(slot.tensor.shape), list(slot.tensor.stride())
            places[key] = {"offset": slot.offset, "shape": shape, "stride": stride}
    return places


class Shards:
    """The agents' parts of a checkpoint, read as they are asked for."""

    def __init__(self, found: Checkpoint, stack: contextlib.ExitStack) -> None:
        self.n = int(found.manifest["run"]["agents"])
        self.stacked = found.manifest["run"]["kind"] == "simulate"  # all agents in one file
        paths = [found.path(k) for k in range(found.count)]
        self.files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        self._x = [file.get_slice("runner.x") for file in self.files]
        self.d = int(self._x[0].get_shape()[-1])
        self.names = set(self.files[0].keys())

    def x(self, i: int, a: int, b: int) -> Tensor:
        part: Tensor = self._x[0][i : i + 1, a:b][0] if self.stacked else self._x[i][a:b]
        return part.clone()

    def outside(self, i: int, name: str) -> Tensor:
        file, at = (self.files[0], i) if self.stacked else (self.files[i], 0)
        tensor: Tensor = file.get_tensor(f"models.{at}.{name}")
        return tensor


def mean_state_dict(found: Checkpoint) -> dict[str, Tensor]:
    """The mean of x as a state_dict; what is outside x is averaged if float, else agent 0's."""
    state: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        shards = Shards(found, stack)
        xbar = mean_x(shards)
        for key, place in found.manifest["layout"].items():
            if isinstance(place, dict):
                view = xbar.as_strided(place["shape"], place["stride"], place["offset"])
                state[key] = view.clone(memory_format=torch.contiguous_format)
            elif f"frozen.{place}" in shards.names:
                state[key] = shards.files[0].get_tensor(f"frozen.{place}")
            else:
                state[key] = shards.outside(0, place)
                if state[key].is_floating_point():
                    each = [shards.outside(i, place).double() for i in range(shards.n)]
                    state[key] = torch.stack(each).mean(0).to(state[key].dtype)
    return state


def mean_x(shards: Shards) -> Tensor:
    """(1/n) sum_i x_i: chunk k is summed from agent k on, as the ring all-reduce does it."""
    chunks = []
    for k, (a, b) in enumerate(ring_chunks(shards.d, shards.n)):
        total = shards.x(k, a, b)
        for step in range(1, shards.n):
            total += shards.x((k + step) % shards.n, a, b)
        chunks.append(total.div_(shards.n))
    return torch.cat(chunks)


def newest(run: Path, say: typing.Callable[[str], None]) -> Checkpoint:
    """A run's newest checkpoint with every shard intact."""
    if not run.is_dir():
        raise UserError(f"there is no run {run}")
    found = stored.choose(run, lambda f: list(range(f.count)), lambda text: [text], say)
    if found is None:
        raise UserError(f"{run} has no checkpoint")
    return found


def task_of(run: Path) -> tuple[Task, Any]:
    """The task a run was started with, and what it did with buffers."""
    try:
        config = json.loads((run / "config.json").read_text())
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
    run = stored.run_of(options.run)
    if found.manifest["bn"] == "recalibrate":
        state = recalibrated(state, *task_of(run))
    temporary = options.out.with_name(f".{options.out.name}.{os.getpid()}")
    try:
        save_file({k: t.contiguous() for k, t in state.items()}, temporary)
        temporary.replace(options.out)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
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
    from .evaluation import MeanModel

    model = task.model()
    model.load_state_dict(state)
    mean = MeanModel(task, model, buffers, True)
    mean.recalibrate()
    return {k: t.detach().clone() for k, t in mean.model.state_dict().items()}


if __name__ == "__main__":
    cli.run(main, Options, prog=PROG)
