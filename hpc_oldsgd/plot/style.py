"""The look of every figure: colours that all eyes tell apart, sizes for a page of paper.

matplotlib is loaded when a figure is drawn, and never through pyplot: no window, no global state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError, no_matplotlib

WIDTH = 7.2  # inches: the text of a page, or two columns
# Okabe and Ito's colours, the dark ones first; yellow is left out, it fades on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
# Dashes change with every line too, so that a line shows through another that covers it.
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.3, 1.2, 1.3)))
INK, GREY = "#1e293b", "#94a3b8"

_RC: Any = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.5,
    "svg.hashsalt": "hpc_oldsgd",  # the same figure is the same file
}


def available() -> bool:
    return find_spec("matplotlib") is not None


@contextlib.contextmanager
def figure(
    stem: Path, formats: Sequence[str], height: float, width: float = WIDTH
) -> Iterator[Any]:
    """A figure to draw into; saved as STEM.FORMAT for every format when the block ends."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib() from None
    with matplotlib.rc_context(_RC):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        for kind, path in zip(formats, files(stem, formats), strict=True):
            undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.savefig(path, dpi=200, facecolor="white", metadata=undated)
            except OSError as error:
                raise UserError(f"Cannot write {path}: {error.strerror}.") from None


def files(stem: Path, formats: Sequence[str]) -> list[Path]:
    return [stem.with_name(f"{stem.name}.{kind}") for kind in formats]


def line(k: int) -> dict[str, Any]:
    """Colour and dashes of the k-th line of a figure; 28 of them differ."""
    return {"color": PALETTE[k % len(PALETTE)], "linestyle": DASHES[k % len(DASHES)]}
