"""A picture of a graph: agents as dots, edges as lines as wide as their weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, no_matplotlib
from .core import Floats, Topology
from .graphs import lattice_sides

MAX_AGENTS = 1024  # past this a picture shows nothing
_PANELS = 6  # rounds of a period that are drawn
_BLUE, _GREY, _INK = "#2b6cb0", "#94a3b8", "#1e293b"


def save(topology: Topology, path: str | Path) -> None:
    """Draw `topology` into a file whose suffix (.png, .pdf, .svg) decides the format."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib() from None
    if topology.n > MAX_AGENTS:
        raise UserError(f"A plot shows at most {MAX_AGENTS} agents, and there are {topology.n}.")
    panels = min(topology.period, _PANELS)
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    at, lattice = _positions(topology)
    wide, high = np.ptp(at, axis=0) + 1 if lattice else (1.0, 1.0)
    height = 4.6 * float(np.clip(high / wide, 0.4, 2.0))
    figure = Figure(figsize=(4.6 * columns, height * rows + 0.7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for r, axis in enumerate(axes):
        axis.set_axis_off()
        if r < panels:
            _draw(axis, topology, r, at, lattice)
    figure.suptitle(
        f"{topology.name}, n = {topology.n}   degree {topology.degree}   "
        rf"$\lambda_2$ = {topology.lambda_2:.4g}   $p$ = {topology.p:.4g}",
        color=_INK,
    )
    try:
        canvas.print_figure(path, dpi=150, facecolor="white", bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot write {path}: {error}.") from None


def _draw(axis: Any, topology: Topology, r: int, at: Floats, lattice: bool) -> None:
    from matplotlib.collections import LineCollection

    n = topology.n
    edges = np.array(topology.edges(r), dtype=int).reshape(-1, 2)
    indptr, indices, weights = topology.csr(r)
    rows = np.repeat(np.arange(n), np.diff(indptr))
    w = weights[rows < indices]
    if len(edges):
        thin = min(1.0, 3 * n / len(edges))  # dense graphs stay legible
        widths = (0.6 + 2.4 * w / w.max()) * max(thin, 0.25)
        lines = LineCollection(
            [_path(at[i], at[j], lattice) for i, j in edges],
            linewidths=widths, colors=_GREY, alpha=max(thin, 0.35), zorder=1,
        )  # fmt: skip
        axis.add_collection(lines)
    size = float(np.clip(9000 / n, 12, 420))
    axis.scatter(
        *at.T, s=size, color=_BLUE, edgecolors="white", linewidths=1.2, zorder=2, clip_on=False
    )
    if n <= 64:
        font = float(np.clip(math.sqrt(size) * 0.55, 5, 11))
        for i, (x, y) in enumerate(at):
            axis.text(x, y, str(i), color="white", size=font, ha="center", va="center", zorder=3)
    if topology.period > 1:
        axis.set_title(f"round {r} of {topology.period}", size=10, color=_INK)
    axis.set_aspect("equal")
    axis.margins(0.12)
    axis.autoscale_view()


def _positions(topology: Topology) -> tuple[Floats, bool]:
    """Lattices on a lattice, stars around their centre, everything else around a circle."""
    n, kind = topology.n, topology.name.partition(":")[0]
    if n == 1:
        return np.zeros((1, 2)), False
    if kind in ("torus", "grid"):
        _, _, shape = topology.name.partition(":")
        rows, cols = map(int, shape.split("x")) if shape else lattice_sides(kind, n)
        if min(rows, cols) > 1 or kind == "grid":
            row, column = np.divmod(np.arange(n), cols)
            return np.stack([column, -row], axis=1).astype(float), True
    centre = 1 if kind == "star" and n > 2 else 0
    angle = np.pi / 2 - 2 * np.pi * np.arange(n - centre) / (n - centre)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return np.concatenate([np.zeros((centre, 2)), circle]), False


def _path(a: Floats, b: Floats, lattice: bool) -> Floats:
    """A straight edge; one that wraps around a torus is bowed, to clear the agents in between."""
    along = b - a
    if not lattice or np.linalg.norm(along) < 1.5:
        return np.stack([a, b])
    bend = (a + b) / 2 + 0.22 * np.array([-along[1], along[0]])
    s = np.linspace(0, 1, 33)[:, None]
    path: Floats = (1 - s) ** 2 * a + 2 * s * (1 - s) * bend + s**2 * b
    return path
