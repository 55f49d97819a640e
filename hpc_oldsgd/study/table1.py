"""The paper's Table 1: what a round of each algorithm costs, formula beside measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from .. import algorithms
from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..cli.fields import at_least
from ..errors import UserError
from ..simulation.trajectory import trajectory
from ..transport.base import LINE
from . import figures
from .collect import Record, Table, grouped, pivot
from .formulas import WARM_UP, Measured, evaluate, text_of
from .report import Report, Section, duration

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Options:
    """Round times of all algorithms, formula beside measured: virtual clock, or --mpi."""

    tau: tuple[int, ...] = (1, 5, 10)
    """Local steps a round."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a model-sized message lasts; with --mpi it is measured instead."""
    agents: tuple[int, ...] = (4, 9, 16)
    """How many; with --mpi there are as many as ranks."""
    algorithm: tuple[str, ...] = ()
    """Which; all if not given."""
    topology: str = "ring"
    """Who talks to whom."""
    mpi: bool = False
    """Measure real messages, under mpirun, with a gradient that sleeps."""
    model_bytes: int = 4_000_000
    """With --mpi: size of the model."""
    grad_seconds: float = 0.05
    """With --mpi: how long a gradient takes."""
    rounds: int = 10
    """With --mpi: how many are measured of each algorithm; their median counts."""
    quick: bool = False
    """The smallest agents and tau, three rounds."""
    out: Path = Path("studies/table1")
    """Folder of the report, table1.csv and a figure."""

    def __post_init__(self) -> None:
        if not (self.tau and self.agents and self.c):
            raise UserError("--tau, --agents and --c must be one or more numbers.")
        at_least(1, self, "tau", "agents", "rounds")
        at_least(0, self, "c", "grad_seconds")
        at_least(4, self, "model_bytes")
        for name in self.algorithm:
            algorithms.get(name)

    @property
    def names(self) -> Sequence[str]:
        return self.algorithm or algorithms.names()

    @property
    def taus(self) -> Sequence[int]:
        return sorted(self.tau)[:1] if self.quick else self.tau

    @property
    def sizes(self) -> Sequence[int]:
        return sorted(self.agents)[:1] if self.quick else self.agents


def main(options: Options) -> int:
    if options.mpi:
        from .table1_mpi import measure  # the import starts MPI

        text, measured = measure(options)
        code = 0
    else:
        measured = list(virtual(options))
        worst = max(
            (abs(r.measured - r.expected) for r in measured if r.expected is not None), default=0
        )
        text = [
            f"{options.topology}, in units of a gradient; formula / measured in the virtual clock.",
            f"Largest difference in {len(measured)} cells: {worst:.1e}.",
        ]
        code = int(worst > TOLERANCE)
    if text:  # rank 0
        Report("Table 1: the time of a round", sections(measured, text, options)).publish(
            options.out
        )
    return code


def virtual(options: Options) -> Iterable[Measured]:
    cells = [
        (n, name, algorithm.tau, algorithm)
        for n in options.sizes for name, algorithm in rows(options)
    ]  # fmt: skip
    if cells:
        largest = max(cells, key=_work)
        start = time.perf_counter()
        round_time(largest[-1], options.topology, largest[0], 1.0)
        pace = (time.perf_counter() - start) / _work(largest)
        seconds = pace * sum(map(_work, cells)) * len(options.c)
        print(f"{len(cells) * len(options.c)} cells, {duration(seconds)}", flush=True)
    for n, name, tau, algorithm in cells:
        for c in options.c:
            expected = evaluate(algorithm.name, tau, c, 2 * (n - 1) / n * c)
            measured = round_time(algorithm, options.topology, n, c)
            yield Measured(name, text_of(algorithm.name), n, tau, c, expected, measured)


def rows(options: Options) -> Iterable[tuple[str, Algorithm]]:
    """The algorithms that can have each tau; those that can send fragments also with P = tau."""
    for name in options.names:
        made = [algorithm for tau in options.taus if (algorithm := algorithms.with_tau(name, tau))]
        yield from ((name, algorithm) for algorithm in made)
        for algorithm in made:
            if isinstance(algorithm, Fragmented) and algorithm.tau > 1:
                yield f"{name}, P = tau", replace(algorithm, fragments=algorithm.tau)


def _work(cell: tuple[int, str, int, Algorithm]) -> int:
    return cell[0] * cell[2]  # agents, steps


def round_time(algorithm: Algorithm, topology: str, n: int, c: float) -> float:
    """A round in the virtual clock, from the schedule alone."""
    x0 = np.zeros((n, LINE * algorithm.P))  # so that fragments are equally long
    run = trajectory(algorithm, topology, x0, lambda i, x, k: x, 0.1, WARM_UP + 1, c)
    return float(run.time[-1] - run.time[-2])


def sections(measured: Sequence[Measured], text: Sequence[str], options: Options) -> list[Section]:
    """One for each n; the first has the CSV of all cells and the figure."""
    number = "{:.4f}" if options.mpi else "{:g}"
    sizes = list(dict.fromkeys(r.n for r in measured))
    made = [Section(f"n = {n}", (), table(measured, n, number)) for n in sizes]
    if made:
        made[0].text, made[0].shown = text, made[0].table
        made[0].table, made[0].name = [asdict(r) for r in measured], "table1"
        made[0].figures = draw([r for r in measured if r.n == sizes[0]], options.out)
    return made


def table(measured: Sequence[Measured], n: int, number: str) -> Table:
    """A line per algorithm, `formula / measured` in the cells."""
    here = [r for r in measured if r.n == n]
    columns = dict.fromkeys(f"tau {r.tau}, c {r.c:.3g}" for r in here)

    def cell(r: Measured) -> tuple[Record, str, str]:
        head = {"algorithm": r.algorithm, "time per round": r.formula, **columns}
        formula = "?" if r.expected is None else number.format(r.expected)
        return head, f"tau {r.tau}, c {r.c:.3g}", f"{formula} / {number.format(r.measured)}"

    return pivot(map(cell, here))


def draw(measured: Sequence[Measured], out: Path) -> Sequence[Path]:
    """Measured, over tau; a panel for each c."""
    if len({r.tau for r in measured}) < 2:
        return []
    panels = []
    for c, here in grouped(map(asdict, measured), lambda r: r["c"]).items():
        drawn = figures.series(here, "algorithm", "tau", "measured")
        panels.append(figures.Panel(f"n = {measured[0].n}, c = {c:.3g}", drawn))
    out.mkdir(parents=True, exist_ok=True)
    return figures.lines(out / "table1", panels, "tau", "time of a round", log="xy")
