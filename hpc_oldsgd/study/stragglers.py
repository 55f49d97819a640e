"""One slow agent: what it costs, and what is left of the overlap's gain.

All agents wait for the slow one in every round, overlapped or not. No iterate changes, so in the
simulator the runs of the other studies are used again, with another clock; over MPI each factor is
a run in which rank 0 takes as much longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from . import engine, figures
from .cells import Cell
from .collect import Record, Table, ratio
from .grid import Grid, StudyOptions
from .measure import beside, comma, mean_reached, setting, state
from .report import Report, Section


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
        if not self.factor or not all(1 <= f < float("inf") for f in self.factor):
            raise UserError("--factor must be finite numbers from 1 on.")


def main(options: Options) -> None:
    grid = Grid(options)
    cells = {
        (name, factor): made(grid, options, name, factor)
        for name in options.algorithm
        for factor in dict.fromkeys((1.0, *options.factor))
    }
    every = [cell for same in cells.values() for cell in same]
    runs = engine.runs(every, options, grid.out)
    clocks = (math.nan,) if options.mpi else options.c
    table: Table = []
    for c in clocks:
        times = {
            key: mean_reached(same, runs, c, slow(key[1]))[0] for key, same in cells.items() if same
        }
        for (name, factor), time in times.items():
            if factor in options.factor:
                slowed = ratio(time, times[name, 1.0])
                table.append(
                    {
                        "algorithm": name, "c": None if math.isnan(c) else c, "factor": factor,
                        "time": time, "slowed down": slowed,
                    }
                )  # fmt: skip
    for line in table:
        ours = [
            r["time"] for r in table
            if r["algorithm"] == "oldsgd" and (r["c"], r["factor"]) == (line["c"], line["factor"])
        ]  # fmt: skip
        line["speed-up of OLDSGD"] = ratio(line["time"], ours[0] if ours else None)
    out = grid.out / "stragglers"
    text = [
        f"{setting(every[0])}; tau = {options.tau}, {options.partition}; agent 0 is slow by "
        f"{comma(f'{f:g}' for f in options.factor)}.",
        "Each cell: time to the target, and that time over OLDSGD's.",
        *state(every, runs),
    ]
    said = ["The paper has no slow agents."]
    sections = [
        Section(
            "One slow agent", text, table, "stragglers", draw(table, out, options), compact(table)
        ),
        beside(every, (), len(options.seeds), runs, said),
    ]
    Report(f"Stragglers: {grid.task.name}", sections, every, options.launcher).publish(
        out, options.write
    )


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
    lines: dict[tuple[str, float | None], Record] = {}
    for line in table:
        key = line["algorithm"], line["c"]
        row = lines.setdefault(key, {"algorithm": key[0], "c": key[1]})
        time, gain = line["time"], line["speed-up of OLDSGD"]
        text = None if time is None else f"{time:.4g}" + ("" if gain is None else f" ({gain:.2f})")
        row[f"slow by {line['factor']:g}"] = text
    return list(lines.values())


def draw(table: Table, out: Path, options: Options) -> list[Path]:
    panels, clocks = [], list(dict.fromkeys(line["c"] for line in table))
    for column, what in (("time", "time to the target"), ("speed-up of OLDSGD", "OLDSGD's gain")):
        for c in clocks:
            lines = {}
            for name in options.algorithm:
                some = [r for r in table if r["algorithm"] == name and r["c"] == c]
                values = [r[column] or math.nan for r in some]
                lines[name] = ([r["factor"] for r in some], values)
            panels.append(figures.Panel(what if c is None else f"{what}, c = {c:g}", lines))
    return figures.lines(
        out / "stragglers", panels, "slow agent's factor", "", columns=len(clocks), share_y=False
    )
