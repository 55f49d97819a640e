"""Which checkpoint a run goes on from, agreed by all ranks, and whether it is the same run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from . import metrics, runs, stored
from .algorithms import Algorithm
from .config import RunOptions
from .errors import UserError
from .export import mean_state_dict
from .stored import Checkpoint, Gather, run_of
from .tasks import Task
from .topology import Topology
from .training import Training

SAME = (
    "topology", "weights", "partition", "optimizer", "momentum", "weight_decay", "buffers",
    "wire", "seed", "c", "slow", "jitter", "degree_aware",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Where a run writes, and what it goes on from."""

    path: Path
    found: Checkpoint | None = None
    average: bool = False
    """Only the mean of the checkpoint's models is taken."""
    here: bool = False
    """The checkpoint is one of this very folder."""

    @property
    def goes_on(self) -> Checkpoint | None:
        return None if self.average else self.found

    def prepare(self, overwrite: bool) -> list[dict[str, Any]]:
        """Make the folder ready, in one process only: the rows that stay. Raises UserError."""
        metrics.prepare(self.path, overwrite, resume=self.here)
        if self.goes_on is None or self.found is None:
            return []
        if self.here:
            stored.remove_newer(self.path, self.found.r)
        return metrics.read_rows(run_of(self.found.folder), self.found.r)


def plan(
    config: RunOptions,
    who: dict[str, Any],
    n: int,
    shards_here: Callable[[Checkpoint], list[int]],
    gather: Gather,
    say: Callable[[str], None],
) -> tuple[Plan, bool]:
    """What --resume and --out come to, and whether to overwrite. Collective; raises UserError."""
    path = source(config)
    if path is None or config.resume_average or config.resume == "auto":
        out = Path(gather(str(runs.folder_for(config, n)))[0])
    else:
        out = config.out or run_of(path)
    if path is None:
        return Plan(out), config.overwrite
    average = config.resume_average
    here = run_of(path).resolve() == out.resolve()
    if average and here:
        raise UserError("--resume-average makes a new run: choose another --out")
    refuse = (lambda run: "") if average else partial(differences, who)
    found = stored.choose(path, shards_here, gather, say, refuse)
    if found is None and config.resume != "auto":
        raise UserError(f"{path} has no checkpoint")
    if found is None:
        say(f"no checkpoint in {out} yet: this is the start")
        return Plan(out), True
    return Plan(out, found, average, here), False


def take_mean(plan: Plan, model: nn.Module) -> None:
    """A fresh start from the mean of the checkpoint's models, if the plan is one."""
    if plan.average and plan.found is not None:
        try:
            model.load_state_dict(mean_state_dict(plan.found))
        except RuntimeError as error:
            first = str(error).split("\n\t")[-1]
            raise UserError(f"the checkpoint is of another model: {first}") from None


def load(
    training: Training, plan: Plan, shard: int, alpha: float, say: Callable[[str], None]
) -> None:
    """Put a run where its checkpoint was. Collective."""
    found = plan.goes_on
    if found is None:
        return
    state = found.read(shard)
    set_alpha(state, alpha)
    training.load_state_dict(state, save=not plan.here)
    told = f"goes on from round {found.r}, iteration {training.runner.t}"
    if alpha != found.manifest["alpha"]:
        told += f", with alpha {alpha:g} instead of {found.manifest['alpha']:g}"
    say(told)


def set_alpha(state: dict[str, Any], alpha: float) -> None:
    """The step size may change; it is read when the first round starts."""
    runner = state["runner"]
    optimizers = runner["optimizers"] if "optimizers" in runner else [runner["optimizer"]]
    for optimizer in optimizers:
        for group in optimizer["param_groups"]:
            group["lr"] = alpha


def identity(
    kind: str, config: RunOptions, algorithm: Algorithm, task: Task, topology: Topology,
    model: nn.Module,
) -> dict[str, Any]:  # fmt: skip
    """What must be the same for a resumed run to be the run that never stopped."""
    shapes = [f"{k}{tuple(t.shape)}{t.dtype}" for k, t in model.state_dict().items()]
    options = dataclasses.asdict(config)
    W = hashlib.sha256()
    for phase in range(topology.period):
        for array in topology.csr(phase):
            W.update(array.tobytes())
    return {
        "kind": kind,
        "agents": topology.n,
        "algorithm": algorithm.name,
        **algorithm.options(),
        "task": task.name,
        # Where the data lies may change, the data may not.
        **{k: v for k, v in dataclasses.asdict(task).items() if not _place(k, v)},
        **{name: _plain(options[name]) for name in SAME if name in options},
        "W": W.hexdigest()[:16],
        "model": hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16],
    }


def differences(now: dict[str, Any], then: dict[str, Any]) -> str:
    """One sentence, or nothing if it is the same run."""
    if now["agents"] != then.get("agents"):
        return (
            f"the checkpoint is of {then.get('agents')} agents, not {now['agents']}: start as "
            "many, or add --resume-average for a fresh start from their mean"
        )
    said = []
    for key in {**now, **then}:
        a, b = now.get(key), then.get(key)
        if a != b:
            if key in ("W", "model"):
                text = {"W": "the mixing weights differ", "model": "the model differs"}[key]
            else:
                text = f"{key.replace('_', '-')} is {a}, was {b}"
            said.append(text)
    if not said:
        return ""
    return f"this is another run than the checkpoint's: {'; '.join(said)}"


def source(config: RunOptions) -> Path | None:
    """The folder that --resume names: a run, or one checkpoint of it."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return config.out
    path = Path(config.resume)
    if not path.is_dir():
        raise UserError(f"--resume {path}: there is no such folder")
    return path


def _place(name: str, value: Any) -> bool:
    return isinstance(value, Path) or name.endswith("_dir") or name in ("pretrained", "tokenizer")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
