"""How much sooner n agents are at the target than one, tau = 5, as in the paper's scaling figure.

More agents average more gradients, so they can take larger steps. How alpha grows with n is a
choice: it stays, grows with sqrt(n) as the convergence bound suggests, or with n as is usual for
large batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import figures, paper
from .cells import Cell
from .collect import Record, Table, ratio
from .grid import Grid, StudyOptions
from .measure import Study, comma, setting
from .report import Section

Rule = Literal["fixed", "sqrt", "linear"]
FACTOR = {"fixed": lambda n: 1.0, "sqrt": math.sqrt, "linear": float}
SMALLER = 10.0  # a small task's step size is this much below the other studies': it is to grow


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Time to a target on 2 to 32 agents against one agent."""

    algorithm: tuple[str, ...] = ("oldsgd",)
    """Which."""
    agents: tuple[int, ...] = ()
    """How many; 1 2 4 8 16 32 if not given. One agent is always among them."""
    tau: int = 5
    """Local steps a round."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a message lasts; over MPI the network decides."""
    rule: tuple[Rule, ...] = ()
    """How alpha grows from one agent's: fixed, sqrt, linear; all three if not given."""
    partition: str = "iid"
    """How the data is split."""

    @property
    def sizes(self) -> list[int]:
        usual = (1, 2, 4, 8, 16) if self.quick else (1, 2, 4, 8, 16, 32)
        return sorted({1, *(self.agents or usual)})

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.rule or (("linear", "sqrt") if self.quick else ("linear", "sqrt", "fixed"))


def main(options: Options) -> None:
    grid = Grid(options)
    alpha, longest = start(grid)
    cells = {
        (name, rule, n): grid.cells(
            [name], [options.tau], agents=n, partition=options.partition,
            alpha=alpha * FACTOR[rule](n), iterations=longest,
        )
        for name in options.algorithm for rule in options.rules for n in options.sizes
    }  # fmt: skip
    study = Study("scaling", grid, cells)
    table = lines(cells, study)
    agents = f"{min(options.sizes)} to {max(options.sizes)}"
    text = [
        f"{setting(study.cells[0], agents)}; tau = {options.tau}, {options.partition}. alpha is "
        f"one agent's and grows by the rule: {comma(options.rules)}. Speed-ups are against one "
        "agent, which waits for nobody.",
        *study.state(),
    ]
    section = Section("More agents", text, table, "scaling", draw(table, study.out, options))
    study.publish("Scaling", [section, study.beside(verdict(table))])


def start(grid: Grid) -> tuple[float, int]:
    """One agent's step size and iterations: a small task takes smaller steps, and more of them."""
    by = 1.0 if grid.task.name in paper.MODEL_OF else SMALLER
    alpha = grid.options.alpha or grid.base.alpha or grid.defaults.alpha / by
    given = grid.options.iterations or grid.base.iterations
    return alpha, given or round(grid.defaults.iterations * by)


def lines(cells: dict[tuple[str, Rule, int], list[Cell]], study: Study) -> Table:
    clocks = study.options.clocks
    found = {key: {c: study.mean_reached(same, c) for c in clocks} for key, same in cells.items()}
    table = []
    for (name, rule, n), times in found.items():
        alone = found[name, rule, 1]
        line: Record = {"algorithm": name, "alpha rule": rule, "agents": n}
        line["alpha"] = cells[name, rule, n][0].alpha
        line["iterations"] = times[clocks[0]][1]
        for c in clocks:
            end = "" if math.isnan(c) else f", c = {c:g}"
            line[f"time{end}"] = times[c][0]
            line[f"speed-up{end}"] = ratio(alone[c][0], times[c][0])
        for model, speedup in paper.SCALING.items():
            line[f"paper, {model}"] = speedup if n == paper.SCALING_AGENTS else None
        table.append(line)
    return table


def verdict(table: Table) -> list[str]:
    said = ["The paper: 14 times (VGG11) and 13 times (ResNet18) at 16 agents, slower beyond."]
    for line in table:
        key = next(k for k in line if k.startswith("speed-up"))
        if line["agents"] == paper.SCALING_AGENTS and line[key] is not None:
            off = line[key] / paper.SCALING["VGG11"] - 1
            said.append(
                f"- {line['algorithm']}, alpha {line['alpha rule']}: {line[key]:.1f} times at "
                f"{paper.SCALING_AGENTS} agents, {off:+.0%} against the paper's VGG11."
            )
    return [*said, "The paper does not say how its step size follows n."]


def draw(table: Table, out: Path, options: Options) -> list[Path]:
    columns = [k for k in table[0] if k.startswith("speed-up")]
    label = "alpha {alpha rule}" if len(options.algorithm) == 1 else "{algorithm}, {alpha rule}"
    labelled = [{**row, "label": label.format(**row)} for row in table]
    stars = {f"paper, {m}": ([paper.SCALING_AGENTS], [s]) for m, s in paper.SCALING.items()}
    guides = {"linear": (options.sizes, options.sizes)}
    panels = []
    for column in columns:
        drawn = figures.series(labelled, "label", "agents", column)
        title = column.partition(", ")[2] or "wall time"
        panels.append(figures.Panel(title, drawn, stars, guides))
    return figures.lines(out / "scaling", panels, "agents", "speed-up to the target", log="xy")
