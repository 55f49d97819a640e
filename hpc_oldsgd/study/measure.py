"""The results of a study's runs: times to the target, and what a reader must know of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..runs.reader import Run
from . import engine, paper, replay
from .cells import DIVERGED, Cell
from .collect import Record, Table, first, grouped
from .grid import Grid
from .report import Report, Section


class Study:
    """The runs of some cells, and the report on them."""

    def __init__(self, name: str, grid: Grid, groups: Mapping[Any, Sequence[Cell]]) -> None:
        """Runs what is missing; the report goes to a folder of this name."""
        self.grid, self.options, self.out = grid, grid.options, grid.out / name
        self.cells = [cell for group in groups.values() for cell in group]
        self.runs: Mapping[str, Run] = engine.runs(self.cells, grid.options, grid.out)

    def publish(self, title: str, sections: Sequence[Section]) -> None:
        title = f"{title}: {self.grid.task.name}"
        report = Report(title, list(sections), self.cells, self.options.launcher)
        report.publish(self.out, self.options.write)

    def state(self, cells: Sequence[Cell] = ()) -> list[str]:
        """What a reader must know of runs that are not there or went wrong."""
        cells = cells or self.cells
        missing = sum(cell.key not in self.runs for cell in cells)
        diverged = [cell for cell in self.there(cells) if (self.run(cell).path / DIVERGED).exists()]
        said = [f"{missing} of {len(cells)} runs are not there yet."] if missing else []
        if diverged:
            names = (f"{c.row} ({c.options.partition}, tau {c.tau})" for c in diverged)
            said.append(f"Diverged: {comma(names)}.")
        return said

    def beside(self, said: Sequence[str], taus: Sequence[int] = ()) -> Section:
        """What the paper has to say, and what differs in the setup; `taus` if the best is taken."""
        seeds, runs = len(self.options.seeds), list(self.runs.values())
        listed = paper.differences(self.cells, tuple(taus), seeds, runs)
        differs = f"What differs from the paper's setup: {'; '.join(listed)}."
        return Section("Beside the paper", [*said, differs])

    def run(self, cell: Cell) -> Run:
        return self.runs[cell.key]

    def there(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those that have a run."""
        return [cell for cell in cells if cell.key in self.runs]

    def table(self, cells: Sequence[Cell], c: float) -> Table:
        """A line for each algorithm and tau: time and iterations to the target."""
        lines: Table = []
        groups = grouped(self.there(cells), lambda cell: (cell.row, cell.tau))
        for (name, tau), same in groups.items():
            time, iterations = self.mean_reached(same, c)
            lines.append({"algorithm": name, "tau": tau, "iterations": iterations, "time": time})
        return lines

    def mean_reached(
        self, cells: Sequence[Cell], c: float, **clock: Any
    ) -> tuple[float, float] | tuple[None, None]:
        """Means of (time, iterations) over the seeds; None if a run is missing or missed the
        target. `clock` as in replay.times."""
        pairs = [self.reached(cell, c, **clock) for cell in self.there(cells)]
        known = [pair for pair in pairs if pair is not None]
        if not known or len(known) < len(cells):
            return None, None
        return sum(p[0] for p in known) / len(known), sum(p[1] for p in known) / len(known)

    def reached(self, cell: Cell, c: float, **clock: Any) -> tuple[float, float] | None:
        """(time, iterations) of the first row at the target; c is not a number over MPI."""
        row = self.first_at_target(cell, c, **clock)
        return None if row is None else (row["time"], row["iteration"])

    def first_at_target(self, cell: Cell, c: float, **clock: Any) -> Record | None:
        assert cell.options.target is not None
        run = self.run(cell)
        timed = run if math.isnan(c) else replay.at(cell, run, c, **clock)
        return first(timed, cell.options.target, *cell.task.primary)


def setting(cell: Cell, agents: str = "", topology: str = "") -> str:
    """In words; agents and topology, where the study varies them, in the caller's."""
    task, options = cell.task, cell.options
    target = ""
    if options.target is not None:
        primary = task.primary[0].replace("_", " ")
        target = f"target {options.target:g} {primary} of the mean model; "
    clock = "wall time over MPI" if cell.mpi else "simulated time, 1 = one gradient"
    return (
        f"{agents or cell.n} agents, {topology or options.topology}, alpha = {cell.alpha:g}, "
        f"batch {task.batch}; {target}at most {cell.iterations:,} iterations; {clock}"
    )


def comma(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def fastest(lines: Table) -> dict[str, Record]:
    """Of each algorithm the tau that is first at the target; without one that is, none."""
    groups = grouped(lines, lambda line: line["algorithm"])
    return {
        name: min(same, key=lambda line: line["time"] or math.inf) for name, same in groups.items()
    }
