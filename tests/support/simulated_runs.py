"""Whole runs of hpc_oldsgd.simulate in the process of the test, and what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_oldsgd import export, simulate
from hpc_oldsgd.cli.console import Console
from hpc_oldsgd.runs import spec
from hpc_oldsgd.runs.backend import Stacked
from hpc_oldsgd.runs.session import Session
from hpc_oldsgd.runs.spec import Spec
from hpc_oldsgd.training.options import SimulateOptions
from support import fast_disk

WALL = {"step_s", "samples_per_s", "eval_s"}
SHORT = "--task logistic --iterations 40 --tau 2 --agents 3 --eval-every 3 --checkpoint-every 2"


class Cut(Exception):
    """What a crash is to a run in this process."""


def parse(words: str, out: Path) -> Spec[SimulateOptions]:
    return spec.parse(SimulateOptions, "simulate", [*words.split(), "--out", str(out)])


def simulated(words: str, out: Path) -> Path:
    return simulate.run(parse(words, out))


def in_memory(asked: Spec[SimulateOptions], **hooks: Any) -> Session:
    """The same run without a folder, ready to go."""
    return Session(asked, Stacked(asked.options), in_folder=False, **hooks)


def crash(words: str, out: Path, monkeypatch: pytest.MonkeyPatch, after: int = 20) -> None:
    """A run that ends in the middle of a round, once it has a checkpoint after its start."""

    def step(_: Console, t: int) -> None:
        if t > after and t % 2 and any(out.glob("checkpoints/*[1-9]*/manifest.json")):
            raise Cut

    with monkeypatch.context() as patch, pytest.raises(Cut):
        fast_disk.make_prompt(patch)
        patch.setattr(Console, "step", step)
        simulated(words, out)


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in WALL} for row in rows]


def last(run: Path) -> dict[str, Any]:
    return export.newest(run, print).read(0)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or a is b)
