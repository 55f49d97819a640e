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

from .. import topology as topologies
from ..errors import UserError
from . import figures, paper
from .cells import Cell
from .collect import Record, Table, grouped, ratio
from .grid import Grid, StudyOptions
from .measure import Study, comma, setting
from .report import Section

Rule = Literal["fixed", "sqrt", "linear"]
FACTOR = {"fixed": lambda n: 1.0, "sqrt": math.sqrt, "linear": float}
SMALLER = 10.0  # a small task's step size is this much below the other studies': it is to grow


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Time to a target on 2 to 32 agents against one agent, on one graph or several."""

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
    topology: tuple[str, ...] = ()
    """Which graphs, if not the ring; of several a table tells which is best for how many agents."""
    warmup: int = 0
    """Iterations of one agent over which alpha grows to its value; n agents take an n-th of it."""

    @property
    def sizes(self) -> list[int]:
        usual = (1, 2, 4, 8, 16) if self.quick else (1, 2, 4, 8, 16, 32)
        return sorted({1, *(self.agents or usual)})

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.rule or (("linear", "sqrt") if self.quick else ("linear", "sqrt", "fixed"))


def main(options: Options) -> None:
    grid = Grid(options)
    cells = cells_of(grid, options)
    study = Study("scaling", grid, cells)
    table = lines(cells, study)
    agents = f"{min(options.sizes)} to {max(options.sizes)}"
    graphs = "each graph" if options.topology else ""
    text = [
        f"{setting(study.cells[0], agents, graphs)}; tau = {options.tau}, {options.partition}. "
        f"alpha is one agent's and grows by the rule: {comma(options.rules)}. Speed-ups are "
        "against one agent, which waits for nobody.",
        *([WARMUP.format(options.warmup)] if options.warmup else []),
        *study.state(),
    ]
    sections = [Section("More agents", text, table, "scaling", draw(table, study.out, options))]
    if len(options.topology) > 1:
        sections.append(Section("Which graph", [WHICH], which(cells, study), "which"))
    study.publish("Scaling", [*sections, study.beside(verdict(table))])


WARMUP = "alpha grows to its value over {} iterations divided by the number of agents."
WHICH = (
    "Speed-up against one agent; in bold the fastest graph of a line. By degree: a message takes c "
    "for each neighbour, one after the other, as on one network card. Elsewhere an exchange takes "
    "c, however many neighbours there are, as in the paper."
)
Key = tuple[str, Rule, str, int]  # row, how alpha grows, graph, agents


def cells_of(grid: Grid, options: Options) -> dict[Key, list[Cell]]:
    """One agent has no graph, and there is no torus of two: those keep to the base's graph."""
    alpha, longest = start(grid)
    made: dict[Key, list[Cell]] = {}
    for name in options.algorithm:
        for rule in options.rules:
            for graph in options.topology or (grid.base.topology,):
                for n in options.sizes:
                    if n > 1 and not there_is(graph, n):
                        continue
                    made[name, rule, graph, n] = grid.cells(
                        [name], [options.tau], agents=n, partition=options.partition,
                        alpha=alpha * FACTOR[rule](n), iterations=longest,
                        warmup=options.warmup // n,
                        topology=graph if n > 1 else grid.base.topology,
                    )  # fmt: skip
    return made


def there_is(graph: str, n: int) -> bool:
    try:
        topologies.from_name(graph, n)
    except UserError:
        return False
    return True


def start(grid: Grid) -> tuple[float, int]:
    """One agent's step size and iterations: a small task takes smaller steps, and more of them."""
    by = 1.0 if grid.task.name in paper.MODEL_OF else SMALLER
    alpha = grid.options.alpha or grid.base.alpha or grid.defaults.alpha / by
    given = grid.options.iterations or grid.base.iterations
    return alpha, given or round(grid.defaults.iterations * by)


def lines(cells: dict[Key, list[Cell]], study: Study) -> Table:
    clocks = study.options.clocks
    several = len({graph for _, _, graph, _ in cells}) > 1
    found = {key: {c: study.mean_reached(same, c) for c in clocks} for key, same in cells.items()}
    table = []
    for (name, rule, graph, n), times in found.items():
        alone = found[name, rule, graph, 1]
        line: Record = {"algorithm": name, "alpha rule": rule, "agents": n}
        line |= {"graph": graph} if several else {}
        line["alpha"] = cells[name, rule, graph, n][0].alpha
        line["iterations"] = times[clocks[0]][1]
        for c in clocks:
            end = "" if math.isnan(c) else f", c = {c:g}"
            line[f"time{end}"] = times[c][0]
            line[f"speed-up{end}"] = ratio(alone[c][0], times[c][0])
        for model, speedup in paper.SCALING.items():
            line[f"paper, {model}"] = speedup if n == paper.SCALING_AGENTS else None
        table.append(line)
    return table


def which(cells: dict[Key, list[Cell]], study: Study) -> Table:
    """A line for each number of agents and clock, a column for each graph."""
    table: Table = []
    clocks = [(c, by_degree) for c in study.options.clocks for by_degree in (False, True)]
    for (name, rule, n), keys in grouped(cells, lambda key: (key[0], key[1], key[3])).items():
        if n == 1:
            continue
        for c, by_degree in clocks:
            head = {"algorithm": name, "alpha rule": rule, "agents": n}
            clock = f"c = {c:g}{', by degree' if by_degree else ''}"
            sooner = {}
            for key in keys:
                alone = study.mean_reached(cells[name, rule, key[2], 1], c)
                own = study.mean_reached(cells[key], c, degree_aware=by_degree)
                sooner[key[2]] = ratio(alone[0], own[0])
            best = max((value for value in sooner.values() if value), default=None)
            table.append(
                {**head, "clock": clock, **{g: _bold(v, v == best) for g, v in sooner.items()}}
            )
    columns = dict.fromkeys(k for line in table for k in line)
    return [{k: line.get(k) for k in columns} for line in table]


def _bold(value: float | None, best: bool) -> str | None:
    return None if value is None else f"**{value:.3g}**" if best else f"{value:.3g}"


def verdict(table: Table) -> list[str]:
    said = ["The paper: 14 times (VGG11) and 13 times (ResNet18) at 16 agents, slower beyond."]
    for line in table:
        key = next(k for k in line if k.startswith("speed-up"))
        if line["agents"] == paper.SCALING_AGENTS and line[key] is not None:
            off = line[key] / paper.SCALING["VGG11"] - 1
            said.append(
                f"- {line['algorithm']}, alpha {line['alpha rule']}"
                f"{', ' + line['graph'] if 'graph' in line else ''}: {line[key]:.1f} times at "
                f"{paper.SCALING_AGENTS} agents, {off:+.0%} against the paper's VGG11."
            )
    return [*said, "The paper does not say how its step size follows n."]


def draw(table: Table, out: Path, options: Options) -> list[Path]:
    columns = [k for k in table[0] if k.startswith("speed-up")]
    label = "alpha {alpha rule}" if len(options.algorithm) == 1 else "{algorithm}, {alpha rule}"
    label += ", {graph}" if "graph" in table[0] else ""
    labelled = [{**row, "label": label.format(**row)} for row in table]
    stars = {f"paper, {m}": ([paper.SCALING_AGENTS], [s]) for m, s in paper.SCALING.items()}
    guides = {"linear": (options.sizes, options.sizes)}
    panels = []
    for column in columns:
        drawn = figures.series(labelled, "label", "agents", column)
        title = column.partition(", ")[2] or "wall time"
        panels.append(figures.Panel(title, drawn, stars, guides))
    return figures.lines(out / "scaling", panels, "agents", "speed-up to the target", log="xy")
