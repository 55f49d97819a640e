"""Loss, test metric and consensus distance of runs, against iterations or time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..runs.reader import Run
from . import style

X = Literal["iteration", "time"]
LEGEND_ROW = 0.17  # inches
PANEL_LETTERS = 40  # in the smallest type across one panel
MARKED = 30  # up to as many rows, each shows as a dot
CROWD = 8  # more runs than this want thin lines and room
FAR_UP, FAR_DOWN = 1e2, 1e-6  # a run this far from most would leave them one flat line


@dataclass(frozen=True)
class Panel:
    key: str
    title: str
    factor: float = 1.0


def save(
    runs: Sequence[Run], x: X, stem: Path, formats: Sequence[str], title: str, smooth: bool = False
) -> list[Path]:
    """One panel per quantity. With x = "time" all runs must be of one clock."""
    assert x != "time" or len({run.clock for run in runs}) == 1
    panels = choose_panels(runs)
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    widest = max(len(run.label) for run in runs)
    per_row = min(len(runs), max(1, int(120 / (widest + 7))))
    legend = LEGEND_ROW * math.ceil(len(runs) / per_row) if len(runs) > 1 else 0
    tall = 2.35 if len(runs) <= CROWD else 3.0
    with style.figure(stem, formats, height=tall * rows + 0.3 + legend) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        scale, x_label = x_axis(runs, x)
        for axis, panel in zip(axes, panels, strict=False):
            draw(axis, panel, runs, x, scale, smooth)
            axis.set_xlabel(x_label)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        figure.suptitle(title, fontsize=9)
        if len(runs) > 1:
            from matplotlib.lines import Line2D

            handles = [Line2D([], [], label=run.label, **style.line(run.line)) for run in runs]
            figure.legend(handles=handles, loc="outside lower center", ncols=per_row)
    return style.files(stem, formats)


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
    """f(xbar), what the task is judged by on test data, and how far the agents are apart."""
    known = [
        Panel("test_accuracy", "test accuracy, mean model (%)", 100.0),
        Panel("test_perplexity", "test perplexity, mean model"),
    ]
    test = [panel for panel in known if any(run.has(panel.key) for run in runs)]
    return [
        Panel("train_loss", "training loss, mean model"),
        *(test or [Panel("test_loss", "test loss, mean model")]),
        Panel("consensus", "consensus distance"),
    ]


def x_axis(runs: Sequence[Run], x: X) -> tuple[float, str]:
    """What a value is divided by, and the label."""
    if x == "iteration":
        return 1.0, "iteration (gradients per agent)"
    if runs[0].clock == "simulated":
        return 1.0, "simulated time (1 = one gradient)"
    times = [time for run in runs for time in run.values("time")]
    longest = max((time for time in times if time == time), default=0.0)
    units = ((300, 1, "s"), (3 * 3600, 60, "min"), (math.inf, 3600, "h"))
    seconds, unit = next((seconds, unit) for limit, seconds, unit in units if longest <= limit)
    return seconds, f"wall time ({unit})"


def draw(axis: Any, panel: Panel, runs: Sequence[Run], x: X, scale: float, smooth: bool) -> None:
    columns = {id(run): run.values(panel.key, panel.factor) for run in runs if run.has(panel.key)}
    # Agents that start from one model are at distance 0, which has no logarithm.
    near, above, below = in_view({k: [v for v in c if v > 0] for k, c in columns.items()})
    positive = [v for k in near for v in columns[k] if v > 0]
    log = bool(positive) and (panel.key == "consensus" or wide(positive, panel))
    for run in runs:
        values = columns.get(id(run), [])
        look = style.line(run.line)
        marks: dict[str, Any] = {}
        if len(runs) > CROWD:
            look["linewidth"] = 1.1
        elif len(values) <= MARKED:
            marks = {"marker": "o", "markersize": 2.2}
        at = run.values(x, 1 / scale)[: len(values)]
        if smooth and len(values) > 2:
            axis.plot(at, values, color=look["color"], alpha=0.3, linewidth=0.8)
            values, marks = smoothed(values, log), {}
        axis.plot(at, values, **look, **marks)
    if log:
        axis.set_yscale("log")
        plain_ticks(axis, positive)
        if above or below:
            axis.set_ylim(min(positive) / 2, max(positive) * 2)
        names = {id(run): run.label for run in runs}
        edges = (
            (above, "\N{UPWARDS ARROW}", 0.98, "top"),
            (below, "\N{DOWNWARDS ARROW}", 0.02, "bottom"),
        )
        for out, arrow, y, side in edges:
            told = f"{arrow} {', '.join(names[k] for k in out)}" if out else ""
            told = textwrap.fill(told, PANEL_LETTERS, max_lines=3, placeholder=" ...")
            text = axis.text(
                0.98, y, told, transform=axis.transAxes, ha="right", va=side, fontsize=6
            )
            text.set_in_layout(False)  # a long label takes no room from the curves
    axis.set_title(panel.title)
    axis.set_xlim(left=0)
    axis.grid(True)


def in_view(columns: Mapping[int, Sequence[float]]) -> tuple[list[int], list[int], list[int]]:
    """Which runs set the scale, and which leave it: upwards where they diverge, or to rounding."""
    full = {k: values for k, values in columns.items() if values}
    if len(full) < 4:
        return list(full), [], []
    top, bottom = (float(np.median([f(v) for v in full.values()])) for f in (max, min))
    above = [k for k, v in full.items() if not max(v) <= FAR_UP * top]
    below = [k for k, v in full.items() if min(v) < FAR_DOWN * bottom and k not in above]
    return [k for k in full if k not in above + below], above, below


def wide(values: Sequence[float], panel: Panel) -> bool:
    """Whether a logarithmic axis shows more; a share of 100 keeps its own."""
    return panel.key != "test_accuracy" and max(values) > 8 * min(values)


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """A log axis of less than two decades has too few powers of ten to read a value from."""
    if max(values) < 100 * min(values):
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())


def smoothed(values: Sequence[float], log: bool) -> list[float]:
    """A Gaussian window, a twentieth of the rows wide; gaps stay out of the mean.

    On a logarithmic axis it is the logarithms that are averaged: what the eye would do.
    """
    y = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        y = np.log(y) if log else y
        known = np.isfinite(y)
        k = np.arange(len(y))
        sigma = max(0.5, len(y) / 40)
        weights = np.exp(-0.5 * ((k[:, None] - k) / sigma) ** 2) * known
        mean = weights @ np.where(known, y, 0.0) / weights.sum(1)
        mean[~known] = np.nan
    result: list[float] = (np.exp(mean) if log else mean).tolist()
    return result
