"""One slow agent: what it costs, and what is left of the overlap's gain.

All agents wait for the slow one in every round, overlapped or not; no iterate changes, so the runs
of the other studies serve and only the clock is turned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from . import engine, figures
from .collect import Record, Table, ratio
from .measure import beside, comma, reached, setting, state
from .plans import Grid, StudyOptions
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
    """Gradients that a message lasts."""
    partition: str = "iid"
    """How the data is split."""
    agents: int = 9
    """How many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mpi:
            raise UserError("stragglers turns the simulator's clock: leave --mpi out.")
        if not self.factor or not all(1 <= f < float("inf") for f in self.factor):
            raise UserError("--factor must be finite numbers from 1 on.")


def main(options: Options) -> None:
    grid = Grid(options)
    cells = grid.cells(
        options.algorithm, [options.tau], options.seeds[:1], partition=options.partition,
        agents=options.agents,
    )  # fmt: skip
    runs = engine.runs(cells, options, grid.out)
    table: Table = []
    for c in options.c:
        for cell in (cell for cell in cells if cell.key in runs):
            times = {
                f: reached(cell, runs[cell.key], c, (f"0:{f:g}",)) for f in (1.0, *options.factor)
            }
            for factor in options.factor:
                time = None if times[factor] is None else times[factor][0]  # type: ignore[index]
                whole = None if times[1.0] is None else times[1.0][0]
                table.append(
                    {
                        "algorithm": cell.algorithm.name, "c": c, "factor": factor, "time": time,
                        "slowed down": ratio(time, whole),
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
        f"{setting(cells[0])}; tau = {options.tau}, {options.partition}; agent 0 is slow by "
        f"{comma(f'{f:g}' for f in options.factor)}.",
        "Each cell: time to the target, and that time over OLDSGD's.",
        *state(cells, runs),
    ]
    said = ["The paper has no slow agents."]
    sections = [
        Section(
            "One slow agent", text, table, "stragglers", draw(table, out, options), compact(table)
        ),
        beside(cells, (), 1, runs, said),
    ]
    Report(f"Stragglers: {grid.task.name}", sections, cells).publish(out, options.write)


def compact(table: Table) -> Table:
    """A line for each algorithm and c."""
    lines: dict[tuple[str, float], Record] = {}
    for line in table:
        key = line["algorithm"], line["c"]
        row = lines.setdefault(key, {"algorithm": key[0], "c": key[1]})
        time, gain = line["time"], line["speed-up of OLDSGD"]
        text = None if time is None else f"{time:.4g}" + ("" if gain is None else f" ({gain:.2f})")
        row[f"slow by {line['factor']:g}"] = text
    return list(lines.values())


def draw(table: Table, out: Path, options: Options) -> list[Path]:
    panels = []
    for column, what in (("time", "time to the target"), ("speed-up of OLDSGD", "OLDSGD's gain")):
        for c in options.c:
            lines = {}
            for name in options.algorithm:
                some = [r for r in table if r["algorithm"] == name and r["c"] == c]
                values = [r[column] or math.nan for r in some]
                lines[name] = ([r["factor"] for r in some], values)
            panels.append(figures.Panel(f"{what}, c = {c:g}", lines))
    return figures.lines(
        out / "stragglers", panels, "slow agent's factor", "", columns=len(options.c), share_y=False
    )
