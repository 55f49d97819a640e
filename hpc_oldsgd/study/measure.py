"""The results of a study's runs: times to the target, and what a reader must know of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ..runs.reader import Run
from . import paper, replay
from .cells import DIVERGED, Cell
from .collect import Record, Table, first
from .report import Section

Runs = Mapping[str, Run]


def setting(cell: Cell, agents: str = "", topology: str = "") -> str:
    """In words; agents and topology, where the study varies them, in the caller's."""
    task, config = cell.task, cell.config
    target = ""
    if config.target is not None:
        target = f"target {config.target:g} {task.primary[0].replace('_', ' ')} of the mean model; "
    clock = "wall time over MPI" if cell.mpi else "simulated time, 1 = one gradient"
    return (
        f"{agents or cell.n} agents, {topology or config.topology}, alpha = {cell.alpha:g}, "
        f"batch {task.batch}; {target}at most {cell.iterations:,} iterations; {clock}"
    )


def comma(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def state(cells: Sequence[Cell], runs: Runs) -> list[str]:
    """What a reader must know of runs that are not there or went wrong."""
    missing = sum(cell.key not in runs for cell in cells)
    diverged = [c for c in cells if c.key in runs and (runs[c.key].path / DIVERGED).exists()]
    said = [f"{missing} of {len(cells)} runs are not there yet."] if missing else []
    if diverged:
        names = (f"{c.algorithm.name} ({c.config.partition}, tau {c.tau})" for c in diverged)
        said.append(f"Diverged: {comma(names)}.")
    return said


def table(cells: Sequence[Cell], runs: Runs, c: float) -> Table:
    """A line for each algorithm and tau: time and iterations to the target, means over seeds."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        if cell.key in runs:
            groups.setdefault((cell.algorithm.name, cell.tau), []).append(cell)
    lines: Table = []
    for (name, tau), same in groups.items():
        time, iterations = mean_reached(same, runs, c)
        lines.append({"algorithm": name, "tau": tau, "iterations": iterations, "time": time})
    return lines


def mean_reached(
    cells: Sequence[Cell], runs: Runs, c: float, slow: tuple[str, ...] = (),
    degree_aware: bool = False,
) -> tuple[float, float] | tuple[None, None]:  # fmt: skip
    """Means of (time, iterations) over the seeds; None if a run is missing or missed the target."""
    there = (reached(x, runs[x.key], c, slow, degree_aware) for x in cells if x.key in runs)
    pairs = [pair for pair in there if pair is not None]
    if not pairs or len(pairs) < len(cells):
        return None, None
    return sum(p[0] for p in pairs) / len(pairs), sum(p[1] for p in pairs) / len(pairs)


def reached(
    cell: Cell, run: Run, c: float, slow: tuple[str, ...] = (), degree_aware: bool = False
) -> tuple[float, float] | None:
    """(time, iterations) of the first row at the target; c is not a number over MPI."""
    assert cell.config.target is not None
    timed = run if math.isnan(c) else replay.at(cell, run, c, slow, degree_aware)
    row = first(timed, cell.config.target, *cell.task.primary)
    return None if row is None else (row["time"], row["iteration"])


def fastest(lines: Table) -> dict[str, Record]:
    """Of each algorithm the tau that is first at the target; without one that is, none."""
    best: dict[str, Record] = {}
    for line in lines:
        old = best.get(line["algorithm"])
        if old is None or (line["time"] or math.inf) < (old["time"] or math.inf):
            best[line["algorithm"]] = line
    return best


def beside(
    cells: Sequence[Cell], taus: Sequence[int], seeds: int, runs: Runs, said: Sequence[str]
) -> Section:
    """What the paper has to say, and what differs in the setup; no taus where none is chosen."""
    listed = paper.differences(cells, tuple(taus), seeds, list(runs.values()))
    lines = [*said, "What differs from the paper's setup:", *(f"- {text}" for text in listed)]
    return Section("Beside the paper", lines)
