"""Graphs: what a larger spectral gap gains, and what more neighbours cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import topology as topologies
from ..topology import Topology
from . import figures
from .cells import Cell
from .collect import Record, Table
from .grid import Grid, StudyOptions
from .measure import Study, setting
from .report import Section


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
    study = Study("topologies", grid, cells)
    table = [line(graphs[name], cells[name], study) for name in graphs]
    text = [
        f"{setting(study.cells[0], topology='each topology')}; {options.algorithm}, "
        f"tau = {options.tau}, {options.partition}.",
        "p = 1 - lambda_2^2, the spectral gap of the bound. In the paper's clock an exchange costs "
        "c however many neighbours there are; by degree each neighbour costs c, one after the "
        "other, as on one network card.",
        *study.state(),
    ]
    drawn = draw(table, study.out)
    section = Section("Spectral gap against speed", text, table, "topologies", drawn)
    study.publish("Topologies", [section, study.beside(["The paper trains on the ring alone."])])


def line(graph: Topology, cells: list[Cell], study: Study) -> Record:
    def mean(column: str, c: float = math.nan, **clock: Any) -> float | None:
        """Over the seeds, at the target; none if one missed it."""
        rows = [study.first_at_target(cell, c, **clock) for cell in study.there(cells)]
        known = [row[column] for row in rows if row is not None]
        return sum(known) / len(known) if known and len(known) == len(rows) else None

    result: Record = {
        "topology": graph.name, "neighbours": degree(graph), "lambda_2": graph.lambda_2,
        "p": graph.p, "consensus": mean("consensus"), "iterations": mean("iteration"),
    }  # fmt: skip
    if study.options.mpi:
        return {**result, "seconds": mean("time")}
    for aware in (False, True):
        for c in study.options.clocks:
            name = f"time{', by degree' if aware else ''}, c = {c:g}"
            result[name] = mean("time", c, degree_aware=aware)
    return result


def degree(graph: Topology) -> float:
    """Neighbours that an agent sends to in a round, on average."""
    return sum(len(graph.csr(r)[1]) for r in range(graph.period)) / graph.period / graph.n


def draw(table: Table, out: Path) -> list[Path]:
    columns = [k for k in table[0] if k.startswith(("time", "seconds"))]
    drawn = {column: figures.points(table, "p", column) for column in columns}
    apart = {"consensus distance": figures.points(table, "p", "consensus")}
    panels = [
        figures.Panel("time to the target", drawn, names=names(table, columns)),
        figures.Panel("agents apart, there", apart, names=names(table, ["consensus"])),
    ]
    return figures.lines(out / "topologies", panels, "spectral gap p", "", log="y", share_y=False)


def names(table: Table, columns: list[str]) -> dict[str, tuple[float, float]]:
    """Each graph's name at its highest point."""
    tops = [max((row[k] or 0.0 for k in columns), default=0.0) for row in table]
    return {r["topology"]: (r["p"], top) for r, top in zip(table, tops, strict=True) if top}
