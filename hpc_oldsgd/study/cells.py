"""A cell of a study is a run: its options, its folder, and whether that folder holds it already.

Which run a folder holds is read from its config.json, so that runs by hand count as well. What
changes no iterate (c, slow agents, how often is measured) does not tell two simulations apart:
times at another c come from `replay`. A run that was measured too rarely, or on too few samples,
is not done.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..cli.fields import dashed, options
from ..errors import UserError
from ..runs import reader
from ..runs.identity import described, same_iterates
from ..runs.reader import Run
from ..runs.spec import Spec
from ..training.options import RunOptions, SimulateOptions
from .collect import first

DIVERGED = "diverged"  # a file in the folder of a run that no more steps will mend
ROWS = 20  # of a run that is not told how often to measure
SHOWN = ("task", "algorithm", "topology", "partition", "agents", "alpha", "iterations", "target")


@dataclass(frozen=True)
class Cell(Spec[SimulateOptions]):
    mpi: bool = False
    row: str = ""
    """Of the study's tables (rows.py)."""

    @property
    def n(self) -> int:
        return self.options.agents

    @property
    def tau(self) -> int:
        return self.algorithm.tau

    @property
    def key(self) -> str:
        """The same for runs with the same iterates."""
        return same_iterates(described(self, self.n), self.mpi)

    @property
    def folder(self) -> str:
        given = self.options
        parts = [
            self.algorithm.name, f"tau{self.tau}", *self._fragments, given.partition, f"n{self.n}",
            Path(given.topology).stem, f"seed{given.seed}",
        ]  # fmt: skip
        parts += ["mpi"] if self.mpi else []
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:6]
        return "-".join([*parts, digest]).replace(":", "")

    @property
    def _fragments(self) -> list[str]:
        return [f"P{self.algorithm.P}"] if self.algorithm.P > 1 else []

    def words(self, out: Path) -> list[str]:
        """The options of `simulate` or `train`, those at their defaults left out."""
        kind = RunOptions if self.mpi else SimulateOptions
        words = _words(self.options, kind, but=("out", "overwrite", "resume"))
        for part in (self.algorithm, self.task):
            words += _words(part, type(part))
        return [*words, "--out", str(out)]

    def done(self, run: Run) -> bool:
        """Whether nothing is left to run for this cell."""
        if (run.path / DIVERGED).exists():
            return True
        if not run.ended or not run.rows or not self.measured(run):
            return False
        target = self.options.target
        if target is not None and first(run, target, *self.task.primary) is not None:
            return True
        return run.rows[-1]["iteration"] >= self.iterations

    def measured(self, run: Run) -> bool:
        """Whether it was measured as often as this cell asks, and on as many samples."""
        given = run.config["options"]
        asked = self.options
        rounds = [0, *(row["round"] for row in run.rows)]
        most = asked.eval_every or max(1, self.iterations // self.tau // ROWS)
        samples = given.get("eval_samples", asked.eval_samples)
        whole = given.get("final_test", True) or not asked.final_test
        gaps = (after - before for before, after in pairwise(rounds))
        return max(gaps, default=0) <= most and samples >= asked.eval_samples and whole


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


def _words(values: Any, kind: type, but: Sequence[str] = ()) -> list[str]:
    """The options of `kind` as words, except those named by `but`."""
    words: list[str] = []
    for field in options(kind):
        value = getattr(values, field.name, None)
        default = value == field.default and field.name not in SHOWN
        if value is None or default or field.name in but:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{dashed(field.name)}")
        elif not isinstance(value, (tuple, list)):
            words += [f"--{dashed(field.name)}", str(value)]
        elif value:
            words += [f"--{dashed(field.name)}", *map(str, value)]
    return words
