"""One slow agent: what it costs, and what is left of the overlap's gain.

All agents wait for the slow one in every round, overlapped or not. No iterate changes, so in the
simulator the runs of the other studies are used again, with another clock; over MPI each factor is
a run in which rank 0 takes as much longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from . import figures
from .cells import Cell
from .collect import Table, grouped, pivot, ratio
from .grid import Grid, StudyOptions
from .measure import Study, comma, setting
from .report import Section


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """One slow agent: what it costs each algorithm, and what overlap still gains."""

    algorithm: tuple[str, ...] = ("oldsgd", "ldsgd", "kgt", "lsgd")
    """Which."""
    factor: tuple[float, ...] = (1.0, 1.5, 2.0, 3.0, 5.0)
    """How many times longer the slow agent's gradients take."""
    tau: int = 5
    """Local steps a round."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a message lasts; over MPI the network decides."""
    partition: str = "iid"
    """How the data is split."""
    agents: int | None = None
    """How many; as in the paper if not given: 9, and 8 with GPT-2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor:
            raise UserError("--factor must be one or more numbers.")


def main(options: Options) -> None:
    grid = Grid(options)
    cells = {
        (name, factor): made(grid, options, name, factor)
        for name in options.algorithm
        for factor in dict.fromkeys((1.0, *options.factor))
    }
    study = Study("stragglers", grid, cells)
    table = [line for c in options.clocks for line in lines(cells, study, c, options.factor)]
    text = [
        f"{setting(study.cells[0])}; tau = {options.tau}, {options.partition}; agent 0 is slow by "
        f"{comma(f'{f:g}' for f in options.factor)}.",
        "Each cell: time to the target, and that time over OLDSGD's.",
        *study.state(),
    ]
    drawn = draw(table, study.out)
    section = Section("One slow agent", text, table, "stragglers", drawn, compact(table))
    study.publish("Stragglers", [section, study.beside(["The paper has no slow agents."])])


def lines(
    cells: dict[tuple[str, float], list[Cell]], study: Study, c: float, factors: Sequence[float]
) -> Table:
    times = {
        (name, factor): study.mean_reached(same, c, slow=slow(factor))[0]
        for (name, factor), same in cells.items()
        if same
    }
    return [
        {
            "algorithm": name, "c": None if math.isnan(c) else c, "factor": factor,
            "time": time, "slowed down": ratio(time, times[name, 1.0]),
            "speed-up of OLDSGD": ratio(time, times.get(("oldsgd", factor))),
        }
        for (name, factor), time in times.items() if factor in factors
    ]  # fmt: skip


def slow(factor: float) -> tuple[str, ...]:
    return (f"0:{factor:g}",)


def made(grid: Grid, options: Options, name: str, factor: float) -> list[Cell]:
    """A cell for each seed; over MPI the rank itself is made slow."""
    return grid.cells(
        [name], [options.tau], partition=options.partition, agents=options.agents,
        slow=slow(factor) if options.mpi and factor > 1 else (),
    )  # fmt: skip


def compact(table: Table) -> Table:
    """A line for each algorithm and c."""

    def text(time: float | None, gain: float | None) -> str | None:
        return None if time is None else f"{time:.4g}" + ("" if gain is None else f" ({gain:.2f})")

    return pivot(
        (
            {"algorithm": line["algorithm"], "c": line["c"]}, f"slow by {line['factor']:g}",
            text(line["time"], line["speed-up of OLDSGD"]),
        )
        for line in table
    )  # fmt: skip


def draw(table: Table, out: Path) -> list[Path]:
    panels, by_clock = [], grouped(table, lambda line: line["c"])
    for column, what in (("time", "time to the target"), ("speed-up of OLDSGD", "OLDSGD's gain")):
        for c, some in by_clock.items():
            title = what if c is None else f"{what}, c = {c:g}"
            panels.append(figures.Panel(title, figures.series(some, "algorithm", "factor", column)))
    return figures.lines(
        out / "stragglers", panels, "slow agent's factor", "", columns=len(by_clock), share_y=False
    )
