"""A small run of a study."""

from __future__ import annotations

from typing import Any

from hpc_oldsgd import algorithms, tasks
from hpc_oldsgd.study.cells import Cell
from hpc_oldsgd.training.options import SimulateOptions


def cell(name: str = "oldsgd", tau: int = 2, **options: Any) -> Cell:
    given = {"task": "logistic", "agents": 3, "iterations": 12, "eval_samples": 20, **options}
    config = SimulateOptions(algorithm=name, eval_every=1, final_test=False, **given)
    return Cell(config, algorithms.get(name)(tau=tau), tasks.get("logistic")())
