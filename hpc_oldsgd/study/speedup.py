"""The paper's Tables 2 and 3: how much sooner OLDSGD is at a target than each other algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import algorithms
from . import engine, figures, paper
from .cells import Cell
from .collect import Record, Table, ratio
from .grid import QUICK_ALGORITHMS, QUICK_TAUS, TAUS, Grid, StudyOptions
from .measure import Runs, beside, comma, fastest, setting, state, table
from .report import Report, Section

READING = (
    "Each cell: the algorithm's time to the target over OLDSGD's, its best tau, and the paper's "
    "number with how far ours is from it."
)


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Time to a target of every algorithm at its best tau, against OLDSGD (Tables 2 and 3)."""

    algorithm: tuple[str, ...] = ()
    """Which; all if not given."""
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
        return self.algorithm or (QUICK_ALGORITHMS if self.quick else algorithms.names())

    @property
    def taus(self) -> tuple[int, ...]:
        return self.tau or (QUICK_TAUS if self.quick else TAUS)


def main(options: Options) -> None:
    grid = Grid(options)
    partitions = options.partition or grid.partitions
    cells = cells_of(grid, options, partitions)
    every = [cell for some in cells.values() for cell in some]
    runs = engine.runs(every, options, grid.out)
    clocks = (math.nan,) if options.mpi else options.c
    times = {(p, c): table(cells[p], runs, c) for p in partitions for c in clocks}
    best = [line for key, lines in times.items() for line in summary(*key, lines, grid.task.name)]
    out = grid.out / "speedup"
    sections = [
        Section(
            "How much sooner OLDSGD is at the target",
            [intro(every[0], options), READING, *state(every, runs)],
            best, "speedup", draw_bars(best, out, grid.task.name), compact(best, grid.task.name),
        ),
        verdict(every, best, options, runs),
        Section(
            "Time to the target by tau", ["A dash: the target was not reached."],
            by_tau(times), "by_tau", draw_taus(times, out) if len(options.taus) > 1 else (),
        ),
    ]  # fmt: skip
    Report(f"Speed-up: {grid.task.name}", sections, every, options.launcher).publish(
        out, options.write
    )


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
    lines: dict[str, Record] = {}
    for line in best:
        where = line["partition"] + ("" if line["c"] is None else f", c = {line['c']:g}")
        if line["time"] is None:
            text = "not reached"
        elif line["speed-up"] is None:
            text = f"{line['time']:.4g} (tau {line['best tau']})"
        else:
            text = f"{line['speed-up']:.2f} (tau {line['best tau']})"
            if line[f"paper, {model}"] is not None:
                text += f"; paper {line[f'paper, {model}']:.2f}, {line[f'against {model}']}"
        lines.setdefault(line["algorithm"], {"algorithm": line["algorithm"]})[where] = text
    columns = dict.fromkeys(k for line in lines.values() for k in line)
    return [{k: line.get(k) for k in columns} for line in lines.values()]


def by_tau(times: Mapping[tuple[str, float], Table]) -> Table:
    lines: dict[tuple[str, float, str], Record] = {}
    taus = sorted({line["tau"] for some in times.values() for line in some})
    for (partition, c), some in times.items():
        for line in some:
            key = (partition, c, line["algorithm"])
            head = {"algorithm": key[2], "partition": partition, "c": None if c != c else c}
            empty = {f"tau {tau}": None for tau in taus}
            lines.setdefault(key, {**head, **empty})[f"tau {line['tau']}"] = line["time"]
    return list(lines.values())


def verdict(cells: Sequence[Cell], best: Table, options: Options, runs: Runs) -> Section:
    """By how much we are off, and what is different."""
    model = paper.nearest(cells[0].task.name)
    column = f"paper, {model}"
    pairs = [(b["speed-up"], b[column]) for b in best if b["speed-up"] and b[column]]
    said = f"No cell here is one of the paper's for {model}."
    if pairs:
        off = [ours / theirs for ours, theirs in pairs]
        mean = math.exp(sum(map(math.log, off)) / len(off))
        said = (
            f"Over the {len(pairs)} cells that the paper has for {model}, our speed-ups are "
            f"{mean:.2f} times the paper's (geometric mean; from {min(off):.2f} to {max(off):.2f})."
        )
        if not set(options.taus) >= set(paper.TAUS):
            each = "the best of " if len(options.taus) > 1 else ""
            said += (
                f" The paper's are each at the best of {len(paper.TAUS)} values of tau, ours at "
                f"{each}tau = {comma(options.taus)}."
            )
    return beside(cells, options.taus, len(options.seeds), runs, [said])


# --- figures ------------------------------------------------------------------------------------
def draw_bars(best: Table, out: Path, task: str) -> Sequence[Path]:
    partitions = list(dict.fromkeys(line["partition"] for line in best))
    column = f"paper, {paper.nearest(task)}"
    groups, marks = [], []
    for partition in partitions:
        heights: dict[str, dict[str, float]] = {}
        stars: dict[str, dict[str, float]] = {}
        for line in best:
            if (
                line["partition"] == partition
                and line["algorithm"] != "oldsgd"
                and line["speed-up"]
            ):
                series = "MPI" if line["c"] is None else f"c = {line['c']:g}"
                heights.setdefault(line["algorithm"], {})[series] = line["speed-up"]
                if line[column] is not None:
                    stars.setdefault(line["algorithm"], {})[series] = line[column]
        groups.append(heights)
        marks.append(stars)
    if not any(groups):
        return []
    return figures.bars(out / "speedup", partitions, groups, marks, "time to target / OLDSGD's")


def draw_taus(times: Mapping[tuple[str, float], Table], out: Path) -> Sequence[Path]:
    panels = []
    for (partition, c), some in times.items():
        names = list(dict.fromkeys(line["algorithm"] for line in some))
        drawn = {
            name: (
                [line["tau"] for line in some if line["algorithm"] == name],
                [line["time"] or math.nan for line in some if line["algorithm"] == name],
            )
            for name in names
        }
        title = partition if math.isnan(c) else f"{partition}, c = {c:g}"
        panels.append(figures.Panel(title, drawn))
    return figures.lines(out / "by_tau", panels, "tau", "time to the target", log="xy")
