"""What fewer bits cost in learning at equal tau, and what they gain in time on an equal link.

A run goes to its end, so the same runs serve both questions, every target and every c.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import ops
from ..errors import UserError
from . import rivals, rows, speedup
from .cells import Cell
from .collect import Record, Table, grouped, pivot
from .grid import Grid
from .measure import Study, comma, fastest, setting
from .report import Section

Wire = Literal["fp32", "bf16", "int8", "int4"]
NUMBERS = 2**20  # in a long message the scales of the blocks are all that is added
SHARE = {
    "fp32": 1.0, "bf16": 0.5,
    "int8": ops.message_bytes(NUMBERS, 8) / (4 * NUMBERS),
    "int4": ops.message_bytes(NUMBERS, 4) / (4 * NUMBERS),
}  # fmt: skip
ALL_REDUCE = ("lsgd", "cocod", "overlap_local_sgd", "co2", "diloco", "eager_diloco", "dga")
GRANTED = (
    "All-reduces have no narrow wire here. They are given its bytes for nothing: their runs are "
    "those of fp32, and only the time is that of the narrow message."
)
LINK = (
    "c is the time of an fp32 message. Each cell: the time of the best tau and wire, both, and the "
    "smallest and largest time over the seeds. A dash: not all seeds reached the target. The first "
    "message of int8 and int4, which is whole, counts as the others do."
)


@dataclass(frozen=True, kw_only=True)
class Options(speedup.Options):
    """Loss and consensus with narrow wires at equal tau, and time to the target at equal link."""

    algorithm: tuple[str, ...] = (*rivals.OURS, "ldsgd", "kgt", "led", "lsgd", "diloco")
    """Which, as in `study speedup`."""
    wire: tuple[Wire, ...] = ("fp32", "bf16", "int8", "int4")
    """What travels."""
    tau: tuple[int, ...] = (1, 5, 20)
    """Local steps a round."""
    c: tuple[float, ...] = (5.0, 20.0)
    """Gradients that an fp32 message lasts."""
    seeds: tuple[int, ...] = (0, 1)
    """A run for each; a table shows the mean and the spread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mpi:
            raise UserError("study wires is simulated: over MPI, bench overlap --wire shows times.")
        if not self.wire:
            raise UserError("--wire must name one or more: fp32, bf16, int8, int4.")


def main(options: Options) -> None:
    grid = Grid(options)
    goal = grid.defaults.target
    partitions = options.partition or grid.partitions
    cells = {(p, w): cells_of(grid, options, p, w) for p in partitions for w in options.wire}
    study = Study("wires", grid, cells)
    text = [f"{setting(study.cells[0])}.", *study.state()]
    learned = learning(study, cells)
    times: Table = [
        {"partition": p, "c": c, "wire": w, **line}
        for (p, w), some in cells.items()
        for c in options.clocks
        for line in rivals.table(study, some, goal, c * SHARE[w])
    ]
    told = f"To {goal:g} {grid.task.primary[0].replace('_', ' ')}; tau among {comma(options.taus)}."
    study.publish(
        "Wires",
        [
            Section("Learning at equal tau", [*text, LEARNING], learned, "learning"),
            Section("Time at an equal link", [told, LINK, GRANTED], best(times), "link"),
            Section("All times", ["Every method, tau and wire."], times, "times"),
        ],
    )


LEARNING = (
    "At the end of the runs: the mean over the seeds, and the smallest and the largest. The "
    "consensus distance is the mean over the agents of the squared distance from the mean model."
)


def cells_of(grid: Grid, options: Options, partition: str, wire: Wire) -> list[Cell]:
    """To the end, past the target."""
    more: dict[str, Any] = {"partition": partition, "agents": options.agents, "target": None}
    made = []
    for row in options.names:
        narrow: dict[str, Any] = {} if wire == "fp32" or all_reduces(row) else {"wire": wire}
        made += grid.cells([row], options.taus, **more, **narrow)
    return made


def all_reduces(row: str) -> bool:
    return rows.algorithm(row) in ALL_REDUCE


def learning(study: Study, cells: Mapping[tuple[str, Wire], Sequence[Cell]]) -> Table:
    """A line for each partition, row and tau; a column for each wire that really travels."""
    key = study.grid.task.primary[0]
    shown = {"loss": "train_loss", key.replace("_", " "): key, "consensus": "consensus"}
    ends = []
    for name, column in shown.items():
        for (partition, wire), some in cells.items():
            sent = [c for c in study.there(some) if study.run(c).rows and not all_reduces(c.row)]
            for (row, tau), same in grouped(sent, lambda cell: (cell.row, cell.tau)).items():
                head = {"partition": partition, "algorithm": row, "tau": tau}
                last = [study.run(cell).rows[-1][column] for cell in same]
                ends.append((head, f"{name}, {wire}", spread(last)))
    return pivot(ends)


def spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3g}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.3g} to {max(values):.3g})"


def best(times: Table) -> Table:
    """Of each row the tau and the wire that are first at the target."""
    cells = []
    for (partition, c), lines in grouped(
        times, lambda line: (line["partition"], line["c"])
    ).items():
        for row, line in fastest(lines).items():
            cells.append(({"algorithm": row}, rivals.column(partition, c), text(line)))
    return pivot(cells)


def text(line: Record) -> str | None:
    if line["time"] is None or math.isinf(line["time"]):
        return None
    told = f"{line['time']:.4g} (tau {line['tau']}, {line['wire']}"
    return f"{told}; {line['least']:.4g} to {line['most']:.4g})"
