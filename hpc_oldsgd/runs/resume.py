"""Which checkpoint a run goes on from, agreed by all ranks, and whether it is the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..algorithms import Algorithm
from ..checkpoints import store
from ..checkpoints.mean import mean_state_dict
from ..checkpoints.shard_file import Unusable
from ..checkpoints.store import Checkpoint, Gather, run_of
from ..errors import UserError
from ..tasks import Task
from ..topology import Topology
from ..training.loop import Training
from ..training.options import RunOptions
from ..transport import heartbeat
from . import claim as claims
from . import folder as run_folder
from . import session

SAME = (
    "topology", "weights", "partition", "optimizer", "momentum", "weight_decay", "buffers",
    "wire", "seed",
)  # fmt: skip
VIRTUAL = ("c", "slow", "jitter", "degree_aware")  # decide the times only where time is simulated
LATE = ("late", "late_wait", "staleness")
DIFFER = {
    "W": "the mixing weights differ", "model": "the model differs", "data": "the data differs",
}  # fmt: skip


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

    def data(self, n: int) -> tuple[list[int], int]:
        """Whose part of the data each rank has, and among how many it was dealt.

        Not rank i's of n once agents have died: the others kept theirs.
        """
        known = self.goes_on.manifest.get("data") if self.goes_on is not None else None
        return (known["agents"], known["of"]) if known else (list(range(n)), n)

    def prepare(self, overwrite: bool) -> list[dict[str, Any]]:
        """Make the folder ready, in one process only: the rows that stay. Raises UserError."""
        run_folder.prepare(self.path, overwrite, resume=self.here)
        heartbeat.clear(self.path)
        if self.goes_on is None or self.found is None:
            return []
        if self.here:
            store.remove_newer(self.path, self.found.r)
        return run_folder.read_rows(run_of(self.found.folder), self.found.r)


def claim(config: RunOptions) -> None:
    """No other job writes any more to a run that goes on: what is found there now stays."""
    path = source(config)
    if path is not None and not config.resume_average:
        out = config.out or run_of(path)
        if (out / "config.json").exists():
            claims.claim(out)


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
        out = Path(gather(str(session.folder_for(config, n)))[0])
    else:
        out = config.out or run_of(path)
    if path is None:
        return Plan(out), config.overwrite
    average = config.resume_average
    here = run_of(path).resolve() == out.resolve()
    if average and here:
        raise UserError("--resume-average makes a new run: choose another --out")
    refuse = (lambda run: "") if average else partial(differences, who)
    found = store.choose(path, shards_here, gather, say, refuse)
    if found is None and config.resume != "auto":
        raise UserError(f"{path} has no checkpoint")
    if found is None:
        if reason := gather(not_the_start(out, who))[0]:  # as rank 0 sees it
            raise UserError(
                f"{reason}: use --overwrite in place of --resume auto, or choose another --out"
            )
        say(f"no checkpoint in {out} yet: this is the start")
        return Plan(out), True
    return Plan(out, found, average, here), False


def not_the_start(out: Path, who: dict[str, Any]) -> str:
    """Why a folder without a checkpoint is more than a run that was killed as it began."""
    kept = out / store.FOLDER
    if os.path.lexists(kept):
        try:
            next(kept.iterdir(), None)
        except OSError as error:
            return f"{kept} cannot be read: {error.strerror}"
    if (out / "summary.json").exists():
        return f"{out} holds a complete run, and no checkpoint of it"
    if not (out / "config.json").exists():
        return ""
    try:
        then = json.loads((out / "config.json").read_bytes())
        told = {key: then[key]["name"] for key in ("algorithm", "task")}
        told["seed"] = then["options"]["seed"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{out} holds something else: its config.json cannot be read"
    said = [f"{k} is {who[k]}, was {v}" for k, v in told.items() if who[k] != v]
    return f"{out} holds another run: {'; '.join(said)}" if said else ""


def take_mean(plan: Plan, *models: nn.Module) -> None:
    """A fresh start from the mean of the checkpoint's models, if the plan is one."""
    if plan.average and plan.found is not None:
        mean = mean_state_dict(plan.found)
        try:
            for model in models:
                model.load_state_dict(mean)
        except RuntimeError as error:
            first = str(error).split("\n\t")[-1]
            raise UserError(f"the checkpoint is of another model: {first}") from None


def read(plan: Plan, shard: int, model: nn.Module) -> dict[str, Any] | None:
    """What `load` takes, found to fit before anything is removed or written for it."""
    found = plan.goes_on
    if found is None:
        return None
    try:
        state = found.read(shard)
    except Unusable as error:
        raise UserError(f"{found.folder}: {error}") from None
    if shard == 0:  # frozen parameters are the same everywhere
        frozen = {k: p for k, p in model.named_parameters() if not p.requires_grad}
        for name in {**frozen, **state["frozen"]}:
            ours, theirs = frozen.get(name), state["frozen"].get(name)
            if ours is None or theirs is None or not torch.equal(ours.cpu(), theirs):
                raise UserError(
                    f"the frozen {name} is not the checkpoint's: another pretrained model?"
                )
    return state


def load(
    training: Training, plan: Plan, state: dict[str, Any] | None, alpha: float,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Put a run where its checkpoint was. Collective."""
    found = plan.goes_on
    if found is None or state is None:
        return
    set_alpha(state, alpha)
    training.load_state_dict(state, save=not plan.here)
    if plan.here and training.checkpoints is not None:
        training.checkpoints.last = found.folder
    told = f"goes on from round {found.r}, iteration {training.runner.t}"
    if training.config.auto_tau:
        told += f", with tau {training.runner.algorithm.tau}"
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
    same = SAME + (VIRTUAL if kind == "simulate" else ()) + (LATE if config.late_policy() else ())
    data = task.fingerprint()
    return {
        "kind": kind,
        "agents": topology.n,
        "algorithm": algorithm.name,
        **algorithm.options(),
        **({"tau": config.auto_tau} if config.auto_tau else {}),
        "task": task.name,
        # Where the data lies may change, the data may not.
        **{k: v for k, v in dataclasses.asdict(task).items() if not _place(k, v)},
        **{name: _plain(options[name]) for name in same if name in options},
        "W": topology.digest(),
        "model": hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16],
        **({"data": data} if data else {}),
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
        if a == b or key == "download" or (key == "data" and key not in then):
            continue  # checkpoints of old versions name the one and not the other
        said.append(DIFFER.get(key, f"{key.replace('_', '-')} is {a}, was {b}"))
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
    known = ("pretrained", "tokenizer", "download")
    return isinstance(value, Path) or name.endswith("_dir") or name in known


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
