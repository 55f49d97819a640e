"""The paper's curves: loss and accuracy of every algorithm against iterations and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import algorithms
from ..errors import UserError
from ..plot import curves, labels, style
from . import engine, replay
from .cells import Cell
from .collect import Record
from .figures import FORMATS
from .grid import QUICK_ALGORITHMS, Grid, StudyOptions
from .measure import Runs, beside, setting, state
from .report import Report, Section


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Loss, accuracy and consensus of every algorithm against iterations and time."""

    algorithm: tuple[str, ...] = ()
    """Which; all if not given."""
    tau: int = 5
    """Local steps a round; algorithms of one step a round keep to it."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a message lasts; over MPI the network decides."""
    partition: tuple[str, ...] = ()
    """How the data is split; iid and label:0.7 if not given."""
    agents: int | None = None
    """How many; as in the paper if not given: 9, and 8 with GPT-2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.seeds) > 1:
            raise UserError("convergence draws one line for each algorithm: --seeds takes one.")


def main(options: Options) -> None:
    grid = Grid(options)
    names = options.algorithm or (QUICK_ALGORITHMS if options.quick else algorithms.names())
    sections = []
    cells = {p: list(chosen(grid, options, names, p)) for p in options.partition or grid.partitions}
    every = [cell for some in cells.values() for cell in some]
    runs = engine.runs(every, options, grid.out)
    out = grid.out / "convergence"
    for partition, some in cells.items():
        there = [cell for cell in some if cell.key in runs and runs[cell.key].rows]
        text = [f"{setting(some[0])}; tau = {options.tau}.", *state(some, runs)]
        table = [line(cell, runs, options) for cell in there]
        name = partition.replace(":", "")
        drawn = draw(there, runs, options, out / name)
        sections.append(Section(partition, text, table, f"final-{name}", drawn))
    said = [
        "The paper shows these curves and no numbers of them. It finds that overlapping LED and "
        "LUGT as OLDSGD overlaps LDSGD (here oled and olgt) converges badly for tau > 1."
    ]
    sections.append(beside(every, (), 1, runs, said))
    Report(f"Convergence: {grid.task.name}", sections, every, options.launcher).publish(
        out, options.write
    )


def chosen(grid: Grid, options: Options, names: Sequence[str], partition: str) -> list[Cell]:
    """To the end, past the target."""
    more = {"partition": partition, "agents": options.agents, "target": None}
    seed = options.seeds[0]
    made = [
        grid.cell(name, options.tau, seed, **more) or grid.cell(name, 1, seed, **more)
        for name in names
    ]
    return [cell for cell in made if cell is not None]


def line(cell: Cell, runs: Runs, options: Options) -> Record:
    run = runs[cell.key]
    last, primary = run.rows[-1], cell.task.primary[0]
    clocks = {} if cell.mpi else {f"time, c = {c:g}": ends(cell, runs, c) for c in options.c}
    return {
        "algorithm": cell.algorithm.name,
        "tau": cell.tau,
        "iterations": last["iteration"],
        "training loss": last["train_loss"],
        primary.replace("_", " "): last.get(primary),
        "consensus": last["consensus"],
        **(clocks or {"seconds": last["time"]}),
    }


def ends(cell: Cell, runs: Runs, c: float) -> float:
    time: float = replay.at(cell, runs[cell.key], c).rows[-1]["time"]
    return time


def draw(cells: Sequence[Cell], runs: Runs, options: Options, stem: Path) -> list[Path]:
    if not cells or not style.available():
        return []
    plain = [dataclasses.replace(runs[cell.key]) for cell in cells]
    for cell, run in zip(cells, plain, strict=True):
        run.label, run.line = cell.algorithm.name, algorithms.names().index(cell.algorithm.name)
    clear(plain)
    title = labels.title(plain)
    stem.parent.mkdir(parents=True, exist_ok=True)
    drawn = curves.save(plain, "iteration", Path(f"{stem}-iteration"), FORMATS, title)
    for c in [0.0] if cells[0].mpi else options.c:
        timed = [replay.at(cell, run, c) for cell, run in zip(cells, plain, strict=True)]
        end = "time" if cells[0].mpi else f"time-c{c:g}"
        said = title if cells[0].mpi else f"{title}, c = {c:g}"
        drawn += curves.save(timed, "time", Path(f"{stem}-{end}"), FORMATS, said)
    return [path for path in drawn if path.suffix == ".png"]


def clear(runs: Sequence[curves.Run]) -> None:
    """Remove the run's own c: the title names the c of the figure."""
    for run in runs:
        options = {k: v for k, v in run.config.get("options", {}).items() if k != "c"}
        run.config = {**run.config, "options": options}
