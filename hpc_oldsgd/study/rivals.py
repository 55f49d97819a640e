"""Every method at its best tau, to targets early, in the middle and late in training.

A run goes on to the last target, so one run serves all of them, and every c.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import figures, replay, rows, speedup
from .cells import Cell
from .collect import Record, Table, first, grouped, pivot
from .grid import Grid
from .measure import Study, comma, fastest, setting
from .report import Section

OURS = (
    "oldsgd", "oldsgd:fragments=tau", "xoldsgd:fragments=tau", "moldsgd:fragments=tau",
)  # fmt: skip
NOLOCO = "noloco@one-peer-exponential"  # it talks to another agent every round
RIVALS = ("ldsgd", "kgt", "led", "lsgd", "cocod", "diloco", "eager_diloco", NOLOCO)
PAPER = {"ldsgd": 1.64, "kgt": 1.63, "lsgd": 1.98, "lugt": 3.05}  # geometric means of the paper
PAPER_C = (1.0, 5.0)
Where = tuple[float, str, float]  # target, partition, c


@dataclass(frozen=True, kw_only=True)
class Options(speedup.Options):
    """Time to several targets of our methods and of their rivals, each at its best tau."""

    algorithm: tuple[str, ...] = (*OURS, *RIVALS)
    """Which, as in `study speedup`; those of oldsgd, xoldsgd and moldsgd count as ours."""
    tau: tuple[int, ...] = (1, 5, 20)
    """Local steps a round."""
    c: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Gradients that a message lasts; over MPI the network decides."""
    targets: tuple[float, ...] = ()
    """From early to late in training; --target alone if not given. A run ends at the last."""
    alphas: tuple[float, ...] = ()
    """Step sizes, of which each method takes its best; --alpha alone if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets and self.target is not None:
            raise UserError("Give --targets or --target, not both.")
        if self.alphas and self.alpha is not None:
            raise UserError("Give --alphas or --alpha, not both.")
        for name in ("targets", "alphas"):
            if not all(0 < number < math.inf for number in getattr(self, name)):
                raise UserError(f"--{name} must be positive numbers.")


def main(options: Options) -> None:
    grid = Grid(options)
    goals = options.targets or (grid.defaults.target,)
    partitions = options.partition or grid.partitions
    cells = {p: cells_of(grid, options, p, goals[-1]) for p in partitions}
    study = Study("rivals", grid, cells)
    times = {
        (goal, p, c): table(study, cells[p], goal, c)
        for goal in goals
        for p in partitions
        for c in options.clocks
    }
    best = {where: fastest(lines) for where, lines in times.items()}
    among = f"tau among {comma(options.taus)}"
    if options.alphas:
        among += f", alpha among {comma(options.alphas)}, each method its best pair"
    text = [f"{setting(study.cells[0])}; {among}.", *study.state()]
    sections = [
        Section(f"Time to {goal:g}", [*text, READING], shown(best, goal), f"time-{goal:g}")
        for goal in goals
    ]
    sections += [
        Section(
            "Ours against each rival",
            [AGAINST],
            against(best, goals),
            "against",
            draw(best, study.out),
        ),
        Section("Where a rival is ahead", behind(best)),
        Section("All times", ["Every method and tau."], all_times(times), "times"),
        study.beside([], options.taus),
    ]
    study.publish("Rivals", sections)


READING = (
    "Each cell: the time of the tau with the smallest mean over the seeds, that tau, and the "
    "smallest and largest time over the seeds. A dash: not all seeds reached it."
)
AGAINST = (
    "The rival's time over that of our fastest method, each at its best tau: geometric mean over "
    "the partitions and c where both reach the target (how many of them); the paper has c = 1 and "
    "5. Its numbers are those of OLDSGD alone, without fragments."
)


def cells_of(grid: Grid, options: Options, partition: str, target: float) -> list[Cell]:
    more: dict[str, Any] = {"partition": partition, "agents": options.agents, "target": target}
    alphas = options.alphas or (grid.defaults.alpha,)
    made = (grid.cells(options.names, options.taus, **more, alpha=alpha) for alpha in alphas)
    return [cell for cells in made for cell in cells]


def table(study: Study, cells: Sequence[Cell], goal: float, c: float) -> Table:
    """A line for each row, tau and alpha; no time unless every seed reached the goal."""
    lines: Table = []
    groups = grouped(cells, lambda cell: (cell.row, cell.tau, cell.alpha))
    several = len({cell.alpha for cell in cells}) > 1
    for (row, tau, alpha), same in groups.items():
        found = [reached(study, cell, goal, c) for cell in study.there(same)]
        times = [time for time in found if time is not None]
        whole = len(times) == len(same)
        lines.append(
            {
                "algorithm": row, "tau": tau, **({"alpha": alpha} if several else {}),
                "time": statistics.mean(times) if whole else None,
                "least": min(times) if whole else None, "most": max(times) if whole else None,
            }
        )  # fmt: skip
    return lines


def reached(study: Study, cell: Cell, goal: float, c: float) -> float | None:
    run = study.run(cell)
    timed = run if math.isnan(c) else replay.at(cell, run, c)
    row = first(timed, goal, *cell.task.primary)
    return None if row is None else float(row["time"])


def is_ours(row: str) -> bool:
    return rows.algorithm(row) in ("oldsgd", "xoldsgd", "moldsgd")


def draw(best: Best, out: Path) -> list[Path]:
    """Time to a target against c, a panel for each target and partition."""
    panels = []
    for (goal, partition), wheres in grouped(best, lambda where: where[:2]).items():
        table = [
            {"algorithm": row, "c": c, "time": line["time"]}
            for _, _, c in wheres
            for row, line in best[goal, partition, c].items()
            if math.isfinite(c)
        ]
        drawn = figures.series(table, "algorithm", "c", "time")
        panels.append(figures.Panel(f"to {goal:g}, {partition}", drawn))
    several = len({c for _, _, c in best}) > 1
    return figures.lines(out / "rivals", panels, "c", "time", log="xy") if several else []


# --- tables -------------------------------------------------------------------------------------
Best = Mapping[Where, Mapping[str, Record]]


def shown(best: Best, goal: float) -> Table:
    def text(line: Record) -> str | None:
        if line["time"] is None:
            return None
        alpha = f", alpha {line['alpha']:g}" if "alpha" in line else ""
        spread = f"; {line['least']:.4g} to {line['most']:.4g}" if spread_of(line) else ""
        return f"{line['time']:.4g} (tau {line['tau']}{alpha}{spread})"

    return pivot(
        ({"algorithm": row}, column(partition, c), text(line))
        for (at, partition, c), lines in best.items()
        if at == goal
        for row, line in lines.items()
    )


def against(best: Best, goals: Sequence[float]) -> Table:
    rivals = dict.fromkeys(row for lines in best.values() for row in lines if not is_ours(row))
    lines: Table = []
    for rival in rivals:
        line: Record = {"rival": rival}
        for goal in goals:
            there = [where for where in best if where[0] == goal]
            paper = [where for where in there if where[2] in PAPER_C]
            if 0 < len(paper) < len(there):
                line[f"to {goal:g}, c = 1, 5"] = mean_ahead(best, paper, rival)
            line[f"to {goal:g}"] = mean_ahead(best, there, rival)
        lines.append({**line, "paper": PAPER.get(rival)})
    return lines


def mean_ahead(best: Best, cells: Sequence[Where], rival: str) -> str | None:
    ratios = [r for where in cells if (r := ahead(best[where], rival))]
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else None


def ahead(lines: Mapping[str, Record], rival: str) -> float | None:
    """How many times as fast as the rival our fastest method is."""
    ours = [line["time"] for row, line in lines.items() if is_ours(row) and line["time"]]
    theirs = lines[rival]["time"] if rival in lines else None
    return theirs / min(ours) if ours and theirs else None


def behind(best: Best) -> list[str]:
    said = [
        f"- to {goal:g}, {column(partition, c)}: {rival} takes {ratio:.2f} of our time"
        for (goal, partition, c), lines in best.items()
        for rival in lines
        if not is_ours(rival) and (ratio := ahead(lines, rival)) and ratio < 1
    ]
    return said or ["Nowhere among the cells above."]


def all_times(times: Mapping[Where, Table]) -> Table:
    return [
        {"target": goal, "partition": partition, "c": None if math.isnan(c) else c, **line}
        for (goal, partition, c), lines in times.items()
        for line in lines
    ]


def column(partition: str, c: float) -> str:
    return partition if math.isnan(c) else f"{partition}, c = {c:g}"


def spread_of(line: Record) -> float:
    return float(line["most"] - line["least"])
