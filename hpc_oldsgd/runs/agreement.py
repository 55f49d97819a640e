"""What all ranks of a job must have alike, compared once at the start, before anything is made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from ..checkpoints.store import Gather
from ..cli.fields import dashed
from ..errors import UserError
from ..tasks import Task
from .identity import is_place
from .spec import Spec

OWN = ("device", "threads", "progress", "staging", "timeout", "tensorboard")
"""Options that each rank may have for itself. So may it find the data in a place of its own."""


def check_options(spec: Spec[Any], gather: Gather) -> None:
    """Collective. Raises UserError, on all ranks alike, that names rank and options."""
    common = {k: v for k, v in dataclasses.asdict(spec.options).items() if k not in OWN}
    chosen = {**spec.algorithm.options(), **common.pop("choice")}
    chosen |= {k: v for k, v in dataclasses.asdict(spec.task).items() if not is_place(k, v)}
    for name in ("alpha", "iterations"):  # the task's own where they are not given
        del common[name]
        chosen[name] = getattr(spec, name)
    texts = gather(json.dumps([common, chosen], default=str))
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        for ours, theirs in zip(first, json.loads(text), strict=True):
            # Another algorithm or task has other options: it alone is named.
            if differ := [k for k in {**ours, **theirs} if str(ours.get(k)) != str(theirs.get(k))]:
                raise UserError(
                    f"rank {rank} has {_words(theirs, differ)}, rank 0 {_words(ours, differ)}: "
                    "start all ranks with the same options"
                )


def check_data(task: Task, gather: Gather) -> None:
    """As far as labels and the task's fingerprint tell. Collective; raises UserError."""
    labels = task.labels()
    seen = f"{labels.shape}{hashlib.sha256(labels.tobytes()).hexdigest()}{task.fingerprint()}"
    texts = gather(seen)
    if other := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        raise UserError(
            f"rank {other[0]} has other training data than rank 0: look at --data-dir, or "
            "HPC_OLDSGD_DATA, and at the files there on each host"
        )


def _words(values: dict[str, Any], names: list[str]) -> str:
    known = [name for name in names if name in values]
    return " ".join(f"--{dashed(name)} {values[name]}" for name in known) or "no such option"
