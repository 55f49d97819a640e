"""Which checkpoint a run goes on from, agreed by all ranks, and what it takes from there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints import store
from ..checkpoints.mean import mean_state_dict
from ..checkpoints.store import Checkpoint, Gather, run_of
from ..checkpoints.well_formed import same_form, state_fits
from ..errors import UserError
from ..files import read_regular
from ..runtime.part_file import Unusable
from ..runtime.sgd import Optimizer
from ..training.options import RunOptions
from ..transport import heartbeat
from . import claim, folder
from .identity import differences


@dataclass(frozen=True)
class Plan:
    """Where a run writes, and what it goes on from."""

    path: Path
    found: Checkpoint | None = None
    average: bool = False
    """Only the mean of the checkpoint's models is taken."""
    here: bool = False
    """The checkpoint is one of this very folder."""
    overwrite: bool = False
    """What the folder holds is removed."""
    seen: dict[str, Any] | None = None
    """How the folder looked when this was decided."""

    @property
    def resumes(self) -> Checkpoint | None:
        return None if self.average else self.found

    @property
    def lost(self) -> list[dict[str, Any]]:
        """The agents that died in the jobs before."""
        return [] if self.resumes is None else list(self.resumes.manifest.get("lost", []))

    def data(self, n: int) -> tuple[list[int], int]:
        """Whose part of the data each rank has, and among how many it was dealt.

        Not rank i's of n once agents have died: the others kept theirs.
        """
        known = self.resumes.manifest.get("data") if self.resumes is not None else None
        return (known["agents"], known["of"]) if known else (list(range(n)), n)

    def take(self) -> list[dict[str, Any]]:
        """Make the folder this job's, in one process only: the rows that stay. Raises UserError."""
        folder.take(self.path, self.overwrite, resume=self.here, seen=self.seen)
        if self.resumes is None or self.found is None:
            return []
        return folder.rows_before(run_of(self.found.folder), self.found.r)

    def clear(self) -> None:
        """Remove what the run replaces."""
        folder.clear(self.path, self.overwrite)
        heartbeat.clear(self.path)
        if self.here and self.found is not None:
            store.remove_newer(self.path, self.found.r)


def claim_folder(options: RunOptions) -> None:
    """No other job writes any more to a run that goes on: what is found there now stays."""
    path = source(options)
    if path is not None and not options.resume_average:
        out = options.out or run_of(path)
        if (out / "config.json").exists():
            claim.claim(out)


def make_plan(
    options: RunOptions,
    own: dict[str, Any],
    n: int,
    parts_here: Callable[[Checkpoint], list[int]],
    gather: Gather,
    say: Callable[[str], None],
) -> Plan:
    """What --resume and --out mean for a run of this identity. Collective; raises UserError."""
    path = source(options)
    if path is None or options.resume_average or options.resume == "auto":
        out = Path(gather(str(folder.folder_for(options, n)))[0])
    else:
        out = options.out or run_of(path)
    seen = folder.look(out)
    if path is None:
        return Plan(out, overwrite=options.overwrite, seen=seen)
    average = options.resume_average
    here = run_of(path).resolve() == out.resolve()
    if average and here:
        raise UserError("--resume-average makes a new run: choose another --out")
    refuse = (lambda run: "") if average else partial(differences, own)
    found = store.choose(path, parts_here, gather, say, refuse)
    if found is None and options.resume != "auto":
        raise UserError(f"{path} has no checkpoint")
    if found is None:
        if reason := gather(not_the_start(out, own))[0]:  # as rank 0 sees it
            raise UserError(
                f"{reason}: use --overwrite in place of --resume auto, or choose another --out"
            )
        say(f"no checkpoint in {out} yet: this is the start")
        return Plan(out, overwrite=True, seen=seen)
    if here and (reason := gather(newer_than(found, path))[0]):
        raise UserError(reason)
    return Plan(out, found, average, here, seen=seen)


def newer_than(found: Checkpoint, path: Path) -> str:
    """Why a run does not go on from one of its checkpoints that the user has named."""
    run = run_of(path)
    newer = [p for p in store.newest_first(run) if p.name > found.folder.name]
    if run == path or not any((p / store.MANIFEST).exists() for p in newer):
        return ""
    return (
        f"{run} has checkpoints after {found.folder.name}, which would be removed: choose another "
        "--out, or remove them yourself"
    )


def not_the_start(out: Path, own: dict[str, Any]) -> str:
    """Why a folder without a checkpoint is more than a run that was killed as it began."""
    kept = out / store.FOLDER
    if os.path.lexists(kept):
        try:
            next(kept.iterdir(), None)
        except OSError as error:
            return f"{kept} cannot be read: {error.strerror}"
    if (out / "summary.json").exists() and not _lost_its_checkpoints(out / "summary.json"):
        return f"{out} holds a complete run, and no checkpoint of it"
    if not (out / "config.json").exists():
        return ""
    try:
        then = json.loads(read_regular(out / "config.json"))
        told = {key: then[key]["name"] for key in ("algorithm", "task")}
        told["seed"] = then["options"]["seed"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{out} holds something else: its config.json cannot be read"
    said = [f"{k} is {own[k]}, was {v}" for k, v in told.items() if own[k] != v]
    return f"{out} holds another run: {'; '.join(said)}" if said else ""


def _lost_its_checkpoints(summary: Path) -> bool:
    """Of a run that could not write them, and whose last words were to use --resume auto."""
    try:
        return "not_saved" in json.loads(read_regular(summary))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


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


def read(plan: Plan, part: int, model: nn.Module, alpha: float) -> dict[str, Any] | None:
    """This process's state, found to fit before anything is removed or written for it.

    The step size may change with a resume; an algorithm reads it when its first round starts.
    """
    found = plan.resumes
    if found is None:
        return None
    try:
        state = found.read(part)
        if not state_fits(state):
            raise Unusable(f"{store.part_name(part)} is not one of ours")
    except Unusable as error:
        raise UserError(f"{found.folder}: {error}") from None
    if part == 0:  # frozen parameters are the same everywhere
        _check_frozen(model, state["frozen"])
    runner = state["runner"]
    optimizers = runner["optimizers"] if "optimizers" in runner else [runner["optimizer"]]
    for optimizer in optimizers:
        for group in optimizer["param_groups"]:
            group["lr"] = alpha
    return state


def misfit(state: dict[str, Any], runner: Any, models: Sequence[nn.Module]) -> str:
    """What of a state this Agent or Swarm and these models could not load; nothing if they can."""
    then, n = state["runner"], runner.transport.n
    if then["x"].shape != runner.x.shape or not then["t"] >= then["r"] >= 0:
        return "x"
    optimizers = [runner.optimizer] if hasattr(runner, "optimizer") else runner.optimizers
    saved = then["optimizers"] if "optimizers" in then else [then["optimizer"]]
    if len(optimizers) != len(saved) or not all(map(_fits_optimizer, optimizers, saved)):
        return "optimizer"
    kept = [{name: t.shape for name, t in one.items()} for one in state["models"]]
    ours = [{name: b.shape for name, b in model.named_buffers()} for model in models]
    same = zip(kept, ours, strict=False)
    if len(kept) != len(ours) or any(a.items() - b.items() for a, b in same):
        return "model"
    if not same_form(runner.state_dict().get("clock"), then.get("clock")):
        return "clock"
    distance = state.get("distance")
    if isinstance(distance, torch.Tensor) and distance.numel() not in (1, n):
        return "distance"
    return "" if len(state["window"]["loss"]) == n else "window"


def _fits_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> bool:
    """The same groups with the same options, and tensors of the parameters' shapes."""
    ours, theirs = optimizer.state_dict()["param_groups"], saved["param_groups"]
    if [group["params"] for group in ours] != [group["params"] for group in theirs]:
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not same_form({**a, "lr": 0}, {**b, "lr": 0}):
            return False
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for k, kept in saved["state"].items():
        if not isinstance(k, int) or not 0 <= k < len(params) or not isinstance(kept, dict):
            return False
        for value in kept.values():
            shape = value.shape if isinstance(value, torch.Tensor) else None
            if value is not None and shape not in ((), params[k].shape):
                return False
    return True


def _check_frozen(model: nn.Module, saved: dict[str, Any]) -> None:
    frozen = {k: p for k, p in model.named_parameters() if not p.requires_grad}
    for name in {**frozen, **saved}:
        ours, theirs = frozen.get(name), saved.get(name)
        if ours is None or theirs is None or not torch.equal(ours.cpu(), theirs):
            raise UserError(f"the frozen {name} is not the checkpoint's: another pretrained model?")


def source(options: RunOptions) -> Path | None:
    """The folder that --resume names: a run, or one checkpoint of it."""
    if options.resume == "never":
        return None
    if options.resume == "auto":
        return options.out
    path = Path(options.resume)
    if not path.is_dir():
        raise UserError(f"--resume {path}: there is no such folder")
    return path
