"""Whole runs of hpc_oldsgd.simulate and .train in the process of the test, and what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd import export, simulate, tasks, train
from hpc_oldsgd.runs import spec
from hpc_oldsgd.runs.backend import Stacked
from hpc_oldsgd.runs.session import Session
from hpc_oldsgd.runs.spec import Spec
from hpc_oldsgd.study import rows
from hpc_oldsgd.study.cells import Cell
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from hpc_oldsgd.training.signals import Inbox
from support import faults

SHORT = "--task logistic --iterations 40 --tau 2 --agents 3 --eval-every 3 --checkpoint-every 2"
WALL = {"step_s", "samples_per_s", "eval_s"}  # columns that no two runs share
WALL_MPI = WALL | {"time", "transfer", "exposed", "hidden"}


class Cut(Exception):
    """What a crash is to a run in this process."""


def parse(words: str, out: Path = Path("none")) -> Spec[SimulateOptions]:
    return spec.parse(SimulateOptions, "simulate", [*words.split(), "--out", str(out)])


def simulated(words: str, out: Path, signals: Inbox | None = None, **hooks: Any) -> Path:
    """`hooks` are those of Session: on_step(t) is called after step t."""
    return simulate.run(parse(words, out), signals, **hooks)


def in_memory(asked: Spec[SimulateOptions], **hooks: Any) -> Session:
    """The same run without a folder, ready to go."""
    return Session(asked, Stacked(asked.options), in_folder=False, **hooks)


def trained(words: str, out: Path, signals: Inbox | None = None) -> None:
    """On all ranks."""
    argv = ["--threads", "1", *words.split(), "--out", str(out)]
    train.run(spec.parse(TrainOptions, "train", argv), signals)


def crash(words: str, out: Path, after: int = 20) -> None:
    """A run that ends in the middle of a round, once it has a checkpoint after its start."""

    def cut(t: int) -> None:
        if t > after and t % 2 and faults.has_checkpoint(out, after_start=True):
            raise Cut

    with faults.fast_disk(), pytest.raises(Cut):
        simulated(words, out, on_step=cut)


def rows_of(run: Path, without: set[str] = WALL) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in without} for row in rows]


def last(run: Path) -> dict[str, Any]:
    """The state in the newest checkpoint."""
    return export.newest(run, print).read(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def study_cell(name: str = "oldsgd", tau: int = 2, **options: Any) -> Cell:
    """A small run of a study."""
    given = {"task": "logistic", "agents": 3, "iterations": 12, "eval_samples": 20, **options}
    config = SimulateOptions(
        algorithm=name.partition(":")[0], eval_every=1, final_test=False, **given
    )
    made = rows.make(name, tau)
    assert made is not None
    return Cell(config, made, tasks.get("logistic")(), row=name)
