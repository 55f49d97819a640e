"""The figures of the studies: lines in panels, and bars beside the paper's marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ..plot import style
from ..plot.curves import plain_ticks
from .tables import Table, grouped

FORMATS = ("png", "svg")
MARKS: tuple[dict[str, Any], ...] = (
    {"marker": "*", "markersize": 8},
    {"marker": "D", "markersize": 4.5, "fillstyle": "none"},
    {"marker": "s", "markersize": 4.5, "fillstyle": "none"},
)
Points = tuple[Sequence[float], Sequence[float]]


@dataclass
class Panel:
    title: str
    lines: Mapping[str, Points]
    """Label to (x, y); what is not finite is a gap."""
    marks: Mapping[str, Points] = field(default_factory=dict)
    """Single points, as the paper's."""
    guides: Mapping[str, Points] = field(default_factory=dict)
    """What to compare with, in grey."""
    names: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Words beside points."""


def points(table: Table, x: str, y: str) -> Points:
    """Two columns; a y that is missing is a gap."""
    return [row[x] for row in table], [row[y] or math.nan for row in table]


def series(table: Table, label: str, x: str, y: str) -> dict[str, Points]:
    """A line for each value of the column `label`."""
    groups = grouped(table, lambda row: row[label])
    return {name: points(same, x, y) for name, same in groups.items()}


def lines(
    stem: Path, panels: Sequence[Panel], x: str, y: str, *, log: str = "", columns: int = 2,
    share_y: bool = True,
) -> list[Path]:  # fmt: skip
    """`log` names the logarithmic axes: "x", "y" or "xy"."""
    drawn = [v for panel in panels for _, ys in panel.lines.values() for v in ys if v == v]
    if not style.available() or not drawn:
        return []
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    known = {label: style.line(k) for k, label in enumerate(labels)}
    with style.figure(stem, FORMATS, height=2.5 * rows + 0.5) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
        for k, panel in enumerate(panels):
            axis = axes[k // columns][k % columns]
            for label, (at, value) in panel.lines.items():
                axis.plot(at, value, marker="o", markersize=2.6, label=label, **known[label])
            for (label, (at, value)), mark in zip(panel.marks.items(), cycle(MARKS)):
                axis.plot(at, value, color=style.INK, linestyle="", label=label, **mark)
            for label, (at, value) in panel.guides.items():
                axis.plot(at, value, color=style.GREY, linewidth=1.0, label=label)
            _scales(axis, panel, log)
            _names(axis, panel)
            axis.set_title(panel.title)
            axis.set_xlabel(x)
            if k % columns == 0 or not share_y:
                axis.set_ylabel(y)
            axis.grid(True)
        for axis in axes.ravel()[len(panels) :]:
            axis.set_axis_off()
        _legend(figure, axes.ravel())
    return [stem.with_suffix(".png")]


def _legend(figure: Any, axes: Sequence[Any], columns: int = 0) -> None:
    """One for all axes, each label once; without a number as many columns as the page has room."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    fit = 100 // (8 + max(map(len, found), default=0))
    columns = columns or min(6, max(1, fit))
    figure.legend(handles=list(found.values()), loc="outside lower center", ncols=columns)


def _names(axis: Any, panel: Panel) -> None:
    """Each on the side of its point where the line is not."""
    points = sorted(panel.names.items(), key=lambda item: item[1])
    for k, (text, at) in enumerate(points):
        rises = points[-1][1][1] > points[0][1][1]
        first, last = k == 0, k == len(points) - 1
        shift, side = ((-2, 5), "right") if rises else ((4, 3), "left")
        if rises and first:
            shift, side = (-3, 6), "left"
        elif last and not rises:
            shift, side = (-4, -9), "right"
        axis.annotate(
            text, at, shift, textcoords="offset points", ha=side, fontsize=7, color=style.INK
        )
    if points:
        axis.margins(y=0.12)


def _scales(axis: Any, panel: Panel, log: str) -> None:
    """A logarithmic axis of a few known values shows those; one of few decades 1, 2 and 5."""
    at = sorted({v for xs, _ in panel.lines.values() for v in xs})
    if "x" in log:
        axis.set_xscale("log")
        if len(at) <= 10:
            axis.set_xticks(at, [f"{v:g}" for v in at])
            axis.xaxis.minorticks_off()
    values = [v for _, ys in panel.lines.values() for v in ys if v == v and v > 0]
    if "y" in log and values:
        axis.set_yscale("log")
        plain_ticks(axis, values)


def bars(
    stem: Path, titles: Sequence[str], groups: Sequence[Mapping[str, Mapping[str, float]]],
    marks: Sequence[Mapping[str, Mapping[str, float]]], y: str,
) -> list[Path]:  # fmt: skip
    """For each title {algorithm: {series: height}}, with the paper's heights as stars."""
    if not style.available():
        return []
    with style.figure(stem, FORMATS, height=2.7) as figure:
        axes = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
        for axis, title, group, mark in zip(axes, titles, groups, marks, strict=True):
            series = list(dict.fromkeys(s for bars in group.values() for s in bars))
            width = 0.8 / max(1, len(series))
            for k, name in enumerate(series):
                at = np.arange(len(group)) + (k - (len(series) - 1) / 2) * width
                heights = [group[a].get(name, np.nan) for a in group]
                axis.bar(at, heights, width * 0.92, color=style.PALETTE[k], label=name)
                stars = [mark.get(a, {}).get(name, np.nan) for a in group]
                label = "the paper" if k == 0 and not np.isnan(stars).all() else None
                axis.plot(at, stars, "*", color=style.INK, markersize=7, label=label)
            axis.axhline(1.0, color=style.GREY, linewidth=0.8)
            named = [name.replace(":", "\n") for name in group]  # options in a line of their own
            axis.set_xticks(range(len(group)), named, rotation=40, ha="right")
            axis.set_title(title)
            axis.grid(True, axis="y")
        axes[0].set_ylabel(y)
        _legend(figure, axes, columns=4)
    return [stem.with_suffix(".png")]
