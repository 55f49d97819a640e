"""A cell of a study is a run: its options, its folder, and whether that folder holds it already.

Which run a folder holds is read from its config.json, so that runs by hand count as well. What
changes no iterate (c, slow agents, how often is measured) does not tell two simulations apart:
times at another c come from `replay`. A run that was measured too rarely, or on too few samples,
is not done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..algorithms import Algorithm
from ..cli.fields import dashed, options
from ..errors import UserError
from ..runs import reader
from ..runs.identity import described, same_iterates
from ..runs.reader import Run
from ..runs.spec import Spec
from ..tasks import Task
from ..training.options import RunOptions, SimulateOptions
from .collect import first

DIVERGED = "diverged"  # a file in the folder of a run that no more steps will mend
ROWS = 20  # of a run that is not told how often to measure
SHOWN = ("task", "algorithm", "topology", "partition", "agents", "alpha", "iterations", "target")


@dataclass(frozen=True)
class Cell:
    config: SimulateOptions
    algorithm: Algorithm
    task: Task
    mpi: bool = False

    @property
    def n(self) -> int:
        return self.config.agents

    @property
    def tau(self) -> int:
        return self.algorithm.tau

    @property
    def spec(self) -> Spec[SimulateOptions]:
        return Spec(self.config, self.algorithm, self.task)

    @property
    def alpha(self) -> float:
        return self.spec.alpha

    @property
    def iterations(self) -> int:
        return self.spec.iterations

    @property
    def key(self) -> str:
        """The same for runs with the same iterates."""
        return same_iterates(described(self.spec, self.n), self.mpi)

    @property
    def folder(self) -> str:
        config = self.config
        parts = [
            self.algorithm.name, f"tau{self.tau}", config.partition, f"n{self.n}",
            Path(config.topology).stem, f"seed{config.seed}",
        ]  # fmt: skip
        parts += ["mpi"] if self.mpi else []
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:6]
        return "-".join([*parts, digest]).replace(":", "")

    def words(self, out: Path) -> list[str]:
        """The options of `simulate` or `train`, those at their defaults left out."""
        kind = RunOptions if self.mpi else SimulateOptions
        own = {f.name for f in options(kind)} - {"out", "overwrite", "resume"}
        config = _words(self.config, own)
        rest = [
            *_words(self.algorithm, {f.name for f in options(type(self.algorithm))}),
            *_words(self.task, {f.name for f in options(type(self.task))}),
        ]
        return [*config, *rest, "--out", str(out)]

    def done(self, run: Run) -> bool:
        """Whether nothing is left to run for this cell."""
        if (run.path / DIVERGED).exists():
            return True
        if not run.ended or not run.rows or not self.measured(run):
            return False
        target = self.config.target
        if target is not None and first(run, target, *self.task.primary) is not None:
            return True
        return run.rows[-1]["iteration"] >= self.iterations

    def measured(self, run: Run) -> bool:
        """Whether it was measured as often as this cell asks, and on as many samples."""
        config = self.config
        rounds = [0, *(row["round"] for row in run.rows)]
        most = config.eval_every or max(1, self.iterations // self.tau // ROWS)
        samples = run.config["options"].get("eval_samples", config.eval_samples)
        gaps = (after - before for before, after in pairwise(rounds))
        return max(gaps, default=0) <= most and samples >= config.eval_samples


class Shelf:
    """The runs below some folders, by what they are."""

    def __init__(self, places: Iterable[Path]) -> None:
        self._runs: dict[str, list[Run]] = {}
        for place in places:
            for path in sorted(place.rglob("config.json")):
                if (path.parent / "metrics.jsonl").is_file():
                    self._add(path.parent)

    def _add(self, path: Path) -> None:
        """Not one that a crash has torn, which is made again, nor another program's."""
        with contextlib.suppress(UserError, LookupError, TypeError, AttributeError):
            for run in reader.read_one(path):
                key = same_iterates(run.config, mpi=run.clock == "wall")
                self._runs.setdefault(key, []).append(run)

    def find(self, cell: Cell) -> Run | None:
        """One that is done if there is any, else the longest."""
        same = self._runs.get(cell.key, [])
        return max(same, key=lambda run: (cell.done(run), _worth(run)), default=None)


def _worth(run: Run) -> tuple[bool, float]:
    return run.ended, run.rows[-1]["iteration"] if run.rows else -1


def _words(values: Any, names: set[str]) -> list[str]:
    words: list[str] = []
    for field in dataclasses.fields(values):
        value = getattr(values, field.name, None)
        if field.name not in names or value is None:
            continue
        if value == field.default and field.name not in SHOWN:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{dashed(field.name)}")
        elif not isinstance(value, (tuple, list)):
            words += [f"--{dashed(field.name)}", str(value)]
        elif value:
            words += [f"--{dashed(field.name)}", *map(str, value)]
    return words
