"""Graphs: what a larger spectral gap gains, and what more neighbours cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import topology as topologies
from ..topology import Topology
from . import engine, figures
from .cells import Cell
from .collect import Record, Table, first
from .grid import Grid, StudyOptions
from .measure import Runs, beside, reached, setting, state
from .report import Report, Section


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Ring, torus, exponential and complete graph: spectral gap against time to a target."""

    topology: tuple[str, ...] = ("ring", "torus", "exponential", "complete")
    """Which graphs."""
    algorithm: str = "oldsgd"
    """Which algorithm."""
    tau: int = 5
    """Local steps a round."""
    c: tuple[float, ...] = (1.0, 5.0)
    """Gradients that a message lasts; over MPI the network decides."""
    partition: str = "label:0.7"
    """How the data is split: the graph matters where the agents' data differ."""
    agents: int = 16
    """How many."""


def main(options: Options) -> None:
    grid = Grid(options)
    graphs = {name: topologies.from_name(name, options.agents) for name in options.topology}
    cells = {
        name: grid.cells(
            [options.algorithm], [options.tau], topology=name, partition=options.partition,
            agents=options.agents,
        )
        for name in graphs
    }  # fmt: skip
    every = [cell for some in cells.values() for cell in some]
    runs = engine.runs(every, options, grid.out)
    table = [line(graphs[name], cells[name], runs, options) for name in graphs]
    out = grid.out / "topologies"
    text = [
        f"{setting(every[0], topology='each topology')}; {options.algorithm}, "
        f"tau = {options.tau}, {options.partition}.",
        "p = 1 - lambda_2^2, the spectral gap of the bound. In the paper's clock an exchange costs "
        "c however many neighbours there are; by degree each neighbour costs c, one after the "
        "other, as on one network card.",
        *state(every, runs),
    ]
    sections = [
        Section("Spectral gap against speed", text, table, "topologies", draw(table, out)),
        beside(every, (), len(options.seeds), runs,
               ["The paper trains on the ring alone."]),
    ]  # fmt: skip
    Report(f"Topologies: {grid.task.name}", sections, every, options.launcher).publish(
        out, options.write
    )


def line(graph: Topology, cells: list[Cell], runs: Runs, options: Options) -> Record:
    there = [cell for cell in cells if cell.key in runs]
    result: Record = {
        "topology": graph.name, "neighbours": degree(graph), "lambda_2": graph.lambda_2,
        "p": graph.p, "consensus": mean([apart(cell, runs) for cell in there]),
    }  # fmt: skip
    clocks: Mapping[str, tuple[float, bool]] = {
        f"time{', by degree' if aware else ''}, c = {c:g}": (c, aware)
        for aware in (False, True) for c in options.c
    }  # fmt: skip
    if options.mpi:
        clocks = {"seconds": (math.nan, False)}
    pairs = [reached(cell, runs[cell.key], math.nan) for cell in there]
    result["iterations"] = mean([None if pair is None else pair[1] for pair in pairs])
    for name, (c, aware) in clocks.items():
        pairs = [reached(cell, runs[cell.key], c, (), aware) for cell in there]
        result[name] = mean([None if pair is None else pair[0] for pair in pairs])
    return result


def degree(graph: Topology) -> float:
    """Neighbours that an agent sends to in a round, on average."""
    return sum(len(graph.csr(r)[1]) for r in range(graph.period)) / graph.period / graph.n


def apart(cell: Cell, runs: Runs) -> float | None:
    assert cell.config.target is not None
    row = first(runs[cell.key], cell.config.target, *cell.task.primary)
    return None if row is None else row["consensus"]


def mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def draw(table: Table, out: Path) -> list[Path]:
    columns = [k for k in table[0] if k.startswith(("time", "seconds"))]
    drawn = {
        column: ([row["p"] for row in table], [row[column] or math.nan for row in table])
        for column in columns
    }
    apart = {
        "consensus distance": ([r["p"] for r in table], [r["consensus"] or math.nan for r in table])
    }
    panels = [
        figures.Panel("time to the target", drawn, names=names(table, columns)),
        figures.Panel("agents apart, there", apart, names=names(table, ["consensus"])),
    ]
    return figures.lines(out / "topologies", panels, "spectral gap p", "", log="y", share_y=False)


def names(table: Table, columns: list[str]) -> dict[str, tuple[float, float]]:
    """Each graph's name at its highest point."""
    tops = {row["topology"]: max((row[k] or 0.0 for k in columns), default=0.0) for row in table}
    return {row["topology"]: (row["p"], tops[row["topology"]]) for row in table
            if tops[row["topology"]]}  # fmt: skip
