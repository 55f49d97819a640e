"""The paper's curves: loss and accuracy of every algorithm against iterations and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from ..plot import curves, labels, style
from ..runs.reader import Run
from . import replay, rows
from .cells import Cell
from .collect import Record
from .figures import FORMATS
from .grid import QUICK_ROWS, Grid, StudyOptions
from .measure import Study, setting
from .report import Section


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Loss, accuracy and consensus of every algorithm against iterations and time."""

    algorithm: tuple[str, ...] = ()
    """Which, as in `study speedup`; all if not given."""
    tau: int = 5
    """Local steps a round; algorithms of one step a round keep to it."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a message lasts; over MPI the network decides."""
    partition: tuple[str, ...] = ()
    """How the data is split; iid and label:0.7 if not given."""
    agents: int | None = None
    """How many; as in the paper if not given: 9, and 8 with GPT-2."""
    target: float | None = None
    """Test accuracy, as 0.9, or perplexity at which runs end; they go to the end if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.seeds) > 1:
            raise UserError("convergence draws one line for each algorithm: --seeds takes one.")


def main(options: Options) -> None:
    grid = Grid(options)
    names = options.algorithm or (QUICK_ROWS if options.quick else rows.every())
    cells = {p: chosen(grid, options, names, p) for p in options.partition or grid.partitions}
    study = Study("convergence", grid, cells)
    sections = []
    for partition, some in cells.items():
        begun = [(cell, study.run(cell)) for cell in study.there(some) if study.run(cell).rows]
        text = [f"{setting(some[0])}; tau = {options.tau}.", *study.state(some)]
        table = [line(cell, run, options) for cell, run in begun]
        name = partition.replace(":", "")
        drawn = draw(begun, [cell.row for cell in some], options, study.out / name)
        sections.append(Section(partition, text, table, f"final-{name}", drawn))
    said = [
        "The paper shows these curves and no numbers of them. It finds that overlapping LED and "
        "LUGT as OLDSGD overlaps LDSGD (here oled and olgt) converges badly for tau > 1."
    ]
    study.publish("Convergence", [*sections, study.beside(said)])


def chosen(grid: Grid, options: Options, names: Sequence[str], partition: str) -> list[Cell]:
    """To the end, past the task's own target; to one that was given."""
    more = {"partition": partition, "agents": options.agents, "target": options.target}
    seed = options.seeds[0]
    made = [
        grid.cell(name, options.tau, seed, **more) or grid.cell(name, 1, seed, **more)
        for name in names
    ]
    return [cell for cell in made if cell is not None]


def line(cell: Cell, run: Run, options: Options) -> Record:
    last, primary = run.rows[-1], cell.task.primary[0]
    times = {c: replay.at(cell, run, c).rows[-1]["time"] for c in options.clocks}
    return {
        "algorithm": cell.row,
        "tau": cell.tau,
        "iterations": last["iteration"],
        "training loss": last["train_loss"],
        primary.replace("_", " "): last.get(primary),
        "consensus": last["consensus"],
        **{"seconds" if cell.mpi else f"time, c = {c:g}": time for c, time in times.items()},
    }


def draw(
    begun: Sequence[tuple[Cell, Run]], order: list[str], options: Options, stem: Path
) -> list[Path]:
    """Each row of the study with a look of its own, also where another one's run is missing."""
    if not begun or not style.available():
        return []
    named = [(cell, to_draw(run, cell.row, order.index(cell.row))) for cell, run in begun]
    plain = [run for _, run in named]
    title = labels.title(plain)
    stem.parent.mkdir(parents=True, exist_ok=True)
    drawn = curves.save(plain, "iteration", Path(f"{stem}-iteration"), FORMATS, title)
    for c in options.clocks:
        timed = [replay.at(cell, run, c) for cell, run in named]
        end, said = ("", "") if options.mpi else (f"-c{c:g}", f", c = {c:g}")
        drawn += curves.save(timed, "time", Path(f"{stem}-time{end}"), FORMATS, title + said)
    return [path for path in drawn if path.suffix == ".png"]


def to_draw(run: Run, name: str, line: int) -> Run:
    """With its label and line, and without its own c: the title names the c of the figure."""
    options = {k: v for k, v in run.config.get("options", {}).items() if k != "c"}
    config = {**run.config, "options": options}
    return replace(run, config=config, label=name, line=line)
