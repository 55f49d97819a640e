"""Label histograms: how many samples of each label each agent has, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, no_matplotlib
from .partition import Ints

MAX_BARS = 20  # labels past this are drawn as a heat map
_INK = "#1e293b"


def counts(labels: Ints, parts: Sequence[Ints]) -> Ints:
    """(agents, labels): samples of each label that each agent has."""
    width = int(labels.max()) + 1
    return np.stack([np.bincount(labels[part], minlength=width) for part in parts])


def skew(table: Ints) -> np.ndarray:
    """Per agent, the total variation distance of its labels to all labels: 0 is iid, 1 disjoint."""
    own = table / table.sum(1, keepdims=True)
    return 0.5 * np.abs(own - table.sum(0) / table.sum()).sum(1)


def text(table: Ints, names: Sequence[str]) -> str:
    """A table with a row per agent; per label only where the labels are few."""
    sizes, labels, skews = table.sum(1), (table > 0).sum(1), skew(table)
    few = table.shape[1] <= MAX_BARS
    width = max(6, *(len(name) for name in names)) + 1 if few and names else 7
    head = f"{'agent':>5} {'samples':>8} {'labels':>6} {'skew':>6}"
    lines = [head + "".join(f"{name:>{width}}" for name in names if few)]
    for i, row in enumerate(table):
        line = f"{i:>5} {sizes[i]:>8} {labels[i]:>6} {skews[i]:>6.3f}"
        lines.append(line + "".join(f"{count:>{width}}" for count in row if few))
    lines.append(f"{'all':>5} {sizes.sum():>8} {table.shape[1]:>6} {skews.mean():>6.3f}")
    return "\n".join(lines)


def save(table: Ints, names: Sequence[str], title: str, path: Path) -> None:
    """Draw the table into a file whose suffix (.png, .pdf, .svg) decides the format."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise no_matplotlib() from None
    n = len(table)
    figure = Figure(figsize=(9, min(1.9 + 0.32 * n, 14)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axis = figure.subplots()
    if table.shape[1] <= MAX_BARS:
        _bars(axis, table, names)
        figure.legend(loc="outside right upper", frameon=False, title="label")
    else:
        _heat(figure, axis, table)
    axis.set_ylabel("agent")
    axis.set_ylim(n - 0.5, -0.5)
    axis.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    axis.set_title(title, color=_INK, fontsize=11)
    try:
        canvas.print_figure(path, dpi=150, facecolor="white")
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot write {path}: {error}.") from None


def _bars(axis: Any, table: Ints, names: Sequence[str]) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10" if table.shape[1] <= 10 else "tab20"]
    left = np.zeros(len(table))
    for label, name in enumerate(names):
        axis.barh(
            np.arange(len(table)), table[:, label], 0.8, left, color=colours(label), label=name
        )
        left += table[:, label]
    axis.set_xlabel("training samples")
    axis.spines[["top", "right"]].set_visible(False)


def _heat(figure: Any, axis: Any, table: Ints) -> None:
    image = axis.imshow(table, aspect="auto", cmap="Blues", interpolation="nearest")
    figure.colorbar(image, ax=axis, label="training samples")
    axis.set_xlabel("label")
