"""The best tau as messages get slower: from the runs of the speed-up study, at many c."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import figures, speedup
from .collect import Record, Table
from .grid import Grid
from .measure import Study, comma, fastest, setting
from .report import Section


@dataclass(frozen=True, kw_only=True)
class Options(speedup.Options):
    """The best tau of each algorithm as c grows."""

    algorithm: tuple[str, ...] = (
        "oldsgd", "oldsgd:fragments=tau", "xoldsgd:fragments=tau", "ldsgd", "kgt", "lsgd",
    )  # fmt: skip
    """Which."""
    c: tuple[float, ...] = (0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
    """Gradients that a message lasts; over MPI the network decides."""


def main(options: Options) -> None:
    grid = Grid(options)
    partitions = options.partition or grid.partitions
    cells = speedup.cells_of(grid, options, partitions)
    study = Study("tau", grid, cells)
    lines = [
        line(partition, c, fastest(study.table(cells[partition], c)), options.algorithm)
        for partition in partitions
        for c in options.clocks
    ]
    text = [
        f"{setting(study.cells[0])}; tau among {comma(options.taus)}.",
        "Each cell: time to the target, and the tau that is first there. A round of OLDSGD, in "
        "fragments too, takes max(tau, c): with tau >= c its messages cost nothing.",
        *study.state(),
    ]
    said = ["The paper names the best tau of its curves and no table of them over c."]
    drawn = draw(lines, study.out, options.algorithm)
    shown = [compact(row, options.algorithm) for row in lines]
    section = Section("Best tau by c", text, lines, "tau", drawn, shown)
    study.publish("Best tau", [section, study.beside(said, options.taus)])


def line(partition: str, c: float, best: dict[str, Record], names: Sequence[str]) -> Record:
    result: Record = {"partition": partition, "c": None if math.isnan(c) else c}
    for name in names:
        found = best.get(name, {"tau": None, "time": None})
        result[f"{name}, tau"] = None if found["time"] is None else found["tau"]
        result[f"{name}, time"] = found["time"]
    return result


def compact(row: Record, names: Sequence[str]) -> Record:
    def text(name: str) -> str | None:
        time, tau = row[f"{name}, time"], row[f"{name}, tau"]
        return None if time is None else f"{time:.4g} (tau {tau})"

    return {"partition": row["partition"], "c": row["c"], **{name: text(name) for name in names}}


def draw(lines: Table, out: Path, names: Sequence[str]) -> list[Path]:
    panels = []
    for what in ("tau", "time"):
        for partition in dict.fromkeys(row["partition"] for row in lines):
            some = [row for row in lines if row["partition"] == partition and row["c"] is not None]
            drawn = {name: figures.points(some, "c", f"{name}, {what}") for name in names}
            title = {"tau": "best tau", "time": "time to the target"}[what]
            panels.append(figures.Panel(f"{title}, {partition}", drawn))
    return figures.lines(out / "tau", panels, "c", "", log="xy", share_y=False)
