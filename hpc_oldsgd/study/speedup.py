"""The paper's Tables 2 and 3: how much sooner OLDSGD is at a target than each other algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import figures, paper, rows
from .cells import Cell
from .collect import Record, Table, grouped, pivot, ratio
from .grid import QUICK_ROWS, QUICK_TAUS, TAUS, Grid, StudyOptions
from .measure import Study, comma, fastest, setting
from .report import Section

OURS, WAIT = ("oldsgd", "xoldsgd"), ("ldsgd", "lsgd")
READING = (
    "Each cell: the algorithm's time to the target over OLDSGD's, its best tau, and the paper's "
    "number with how far ours is from it."
)


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Time to a target of every algorithm at its best tau, against OLDSGD (Tables 2 and 3)."""

    algorithm: tuple[str, ...] = ()
    """Which, with options of their own as xoldsgd:fragments=5,gamma=0.2; oldsgd:fragments=tau has
    as many as the round has steps. All if not given."""
    tau: tuple[int, ...] = ()
    """Local steps a round; the paper's if not given: 1 3 5 10 15 20 30 40."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a message lasts; over MPI the network decides."""
    partition: tuple[str, ...] = ()
    """How the data is split; iid and label:0.7 if not given."""
    agents: int | None = None
    """How many; as in the paper if not given: 9, and 8 with GPT-2."""

    @property
    def names(self) -> Sequence[str]:
        return self.algorithm or (QUICK_ROWS if self.quick else rows.every())

    @property
    def taus(self) -> tuple[int, ...]:
        return self.tau or (QUICK_TAUS if self.quick else TAUS)


def main(options: Options) -> None:
    grid = Grid(options)
    partitions = options.partition or grid.partitions
    cells = cells_of(grid, options, partitions)
    study, task = Study("speedup", grid, cells), grid.task.name
    times = {(p, c): study.table(cells[p], c) for p in partitions for c in options.clocks}
    best = [line for key, lines in times.items() for line in summary(*key, lines, task)]
    sections = [
        Section(
            "How much sooner OLDSGD is at the target",
            [intro(study.cells[0], options), READING, *study.state()],
            best, "speedup", draw_bars(best, study.out, task), compact(best, task),
        ),
        study.beside([*ahead(best), verdict(best, options.taus, task)], options.taus),
        Section(
            "Time to the target by tau", ["A dash: the target was not reached."],
            by_tau(times), "by_tau", draw_taus(times, study.out) if len(options.taus) > 1 else (),
        ),
    ]  # fmt: skip
    study.publish("Speed-up", sections)


def cells_of(grid: Grid, options: Options, partitions: Sequence[str]) -> dict[str, list[Cell]]:
    return {
        p: grid.cells(options.names, options.taus, partition=p, agents=options.agents)
        for p in partitions
    }


def intro(cell: Cell, options: Options) -> str:
    several = len(options.taus) > 1
    best = f"each algorithm at its best tau of {comma(options.taus)}"
    return f"{setting(cell)}; {best if several else f'tau = {options.taus[0]}'}."


def summary(partition: str, c: float, lines: Table, task: str) -> Table:
    best = fastest(lines)
    ours = best.get("oldsgd", {}).get("time")
    model, result = paper.nearest(task), []
    models = (model,) if task in paper.MODEL_OF else paper.MODELS
    for name, line in best.items():
        theirs = {m: paper.speedup(partition, name, m, c) for m in models}
        speedup = ratio(line["time"], ours)
        beside = theirs[model]
        off = None if speedup is None or beside is None else f"{speedup / beside - 1:+.0%}"
        result.append(
            {
                "algorithm": name, "partition": partition, "c": None if math.isnan(c) else c,
                "best tau": line["tau"] if line["time"] is not None else None,
                "iterations": line["iterations"], "time": line["time"], "speed-up": speedup,
                **{f"paper, {m}": value for m, value in theirs.items()}, f"against {model}": off,
            }
        )  # fmt: skip
    return result


def compact(best: Table, task: str) -> Table:
    """A line for each algorithm: our speed-up at its best tau, and the paper's."""
    model = paper.nearest(task)

    def text(line: Record) -> str:
        if line["time"] is None:
            return "not reached"
        if line["speed-up"] is None:
            return f"{line['time']:.4g} (tau {line['best tau']})"
        ours = f"{line['speed-up']:.2f} (tau {line['best tau']})"
        theirs = line[f"paper, {model}"]
        return ours if theirs is None else f"{ours}; paper {theirs:.2f}, {line[f'against {model}']}"

    def where(line: Record) -> str:
        return str(line["partition"]) + ("" if line["c"] is None else f", c = {line['c']:g}")

    return pivot(({"algorithm": line["algorithm"]}, where(line), text(line)) for line in best)


def by_tau(times: Mapping[tuple[str, float], Table]) -> Table:
    taus = sorted({line["tau"] for some in times.values() for line in some})
    empty = {f"tau {tau}": None for tau in taus}
    cells = []
    for (partition, c), some in times.items():
        known = {"partition": partition, "c": None if math.isnan(c) else c, **empty}
        cells += [({"algorithm": line["algorithm"], **known}, f"tau {line['tau']}", line["time"])
                  for line in some]  # fmt: skip
    return pivot(cells)


def ahead(best: Table) -> list[str]:
    """How much sooner our methods are than those that wait, over all columns."""
    columns = grouped(best, lambda line: (line["partition"], line["c"])).values()
    times = [{line["algorithm"]: line["time"] for line in column} for column in columns]
    ours = [row for row in times[0] if rows.algorithm(row) in OURS]
    told = []
    for other in WAIT:
        means = {}
        for row in ours:
            ratios = [ratio(column.get(other), column.get(row)) for column in times]
            if None not in ratios:
                means[row] = geometric(ratios)  # type: ignore[arg-type]
        listed = comma(f"{row} {mean:.2f}" for row, mean in means.items())
        if means:
            told.append(f"{other.upper()}'s time, each at its best tau, is this many times that of "
                        f"{listed} (geometric mean over {len(times)} columns).")  # fmt: skip
    return told


def geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def verdict(best: Table, taus: Sequence[int], task: str) -> str:
    """By how much we are off."""
    model = paper.nearest(task)
    column = f"paper, {model}"
    pairs = [(b["speed-up"], b[column]) for b in best if b["speed-up"] and b[column]]
    said = f"No cell here is one of the paper's for {model}."
    if pairs:
        off = [ours / theirs for ours, theirs in pairs]
        mean = geometric(off)
        said = (
            f"Over the {len(pairs)} cells that the paper has for {model}, our speed-ups are "
            f"{mean:.2f} times the paper's (geometric mean; from {min(off):.2f} to {max(off):.2f})."
        )
        if not set(taus) >= set(paper.TAUS):
            each = "the best of " if len(taus) > 1 else ""
            said += (
                f" The paper's are each at the best of {len(paper.TAUS)} values of tau, ours at "
                f"{each}tau = {comma(taus)}."
            )
    return said


# --- figures ------------------------------------------------------------------------------------
def draw_bars(best: Table, out: Path, task: str) -> Sequence[Path]:
    Bars = dict[str, dict[str, dict[str, float]]]  # partition -> algorithm -> series -> height
    partitions = list(dict.fromkeys(line["partition"] for line in best))
    column = f"paper, {paper.nearest(task)}"
    heights: Bars = {partition: {} for partition in partitions}
    stars: Bars = {partition: {} for partition in partitions}
    for line in best:
        partition, name = line["partition"], line["algorithm"]
        if name != "oldsgd" and line["speed-up"]:
            series = "MPI" if line["c"] is None else f"c = {line['c']:g}"
            heights[partition].setdefault(name, {})[series] = line["speed-up"]
            if line[column] is not None:
                stars[partition].setdefault(name, {})[series] = line[column]
    if not any(heights.values()):
        return []
    groups, marks = list(heights.values()), list(stars.values())
    return figures.bars(out / "speedup", partitions, groups, marks, "time to target / OLDSGD's")


def draw_taus(times: Mapping[tuple[str, float], Table], out: Path) -> Sequence[Path]:
    panels = []
    for (partition, c), some in times.items():
        title = partition if math.isnan(c) else f"{partition}, c = {c:g}"
        panels.append(figures.Panel(title, figures.series(some, "algorithm", "tau", "time")))
    return figures.lines(out / "by_tau", panels, "tau", "time to the target", log="xy")
