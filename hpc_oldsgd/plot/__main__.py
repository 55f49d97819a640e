"""python -m hpc_oldsgd.plot RUN...: figures of one run, or of several over each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import cli
from ..errors import UserError
from ..runs import reader
from ..runs.reader import Run
from . import curves, labels, timeline

PROG = "hpc_oldsgd.plot"


@dataclass(frozen=True)
class Options:
    """Draw runs: loss, test metric and consensus against iterations and time, and a timeline."""

    runs: cli.Positional[tuple[Path, ...]]
    """Folders of runs; they may still be going."""
    out: Path | None = None
    """Folder for the figures; without it plots/ in the run's folder, or here for several runs."""
    format: tuple[Literal["png", "svg", "pdf"], ...] = ("png", "svg")
    """File types."""
    x: tuple[curves.X, ...] = ("iteration", "time")
    """Horizontal axes of the curves; time is wall time, or simulated time of simulated runs."""
    smooth: bool = False
    """Draw a running mean over the measured values."""
    rounds: str | None = None
    """Rounds of the timeline as FROM:TO, TO not included; three typical ones without it."""
    ranks: tuple[int, ...] = ()
    """Ranks of the timeline; the first four without it."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("Name the folder of a run.")
        if not self.format or not self.x:
            raise UserError("--format and --x take at least one value.")
        self.window()

    def window(self) -> tuple[int, int] | None:
        if self.rounds is None:
            return None
        match = re.fullmatch(r"(\d+):(\d+)", self.rounds)
        if not match or int(match[1]) >= int(match[2]):
            raise UserError(f"--rounds takes FROM:TO, as in 10:13, not {self.rounds}.")
        return int(match[1]), int(match[2])


def main(options: Options) -> None:
    runs = reader.read(with_runs(options.runs))
    labels.tell_apart(runs)
    for run in runs:
        if not run.rows:
            print(f"{PROG}: {run.path} has no row of metrics yet")
        elif not run.ended:
            end = run.config.get("iterations", "?")
            print(f"{PROG}: {run.path} has not ended: iteration {run.rows[-1]['iteration']}/{end}")
    out = options.out or (Path() if len(options.runs) > 1 else options.runs[0]) / "plots"
    timelines = read_timelines(runs, options)
    begun = [run for run in runs if run.rows]
    if not begun and not timelines:
        raise UserError("There is nothing to draw yet: no run has a row of metrics or a trace.")
    written = draw_curves(begun, options, out)
    if timelines:
        written += timeline.save(timelines, out / "timeline", options.format)
    for path in written:
        print(path)


def with_runs(paths: Sequence[Path]) -> Sequence[Path]:
    """The folders that hold a run, out of runs/*; if none does, all of them, for the error."""
    others = [p for p in paths if p.exists() and not (p / "metrics.jsonl").is_file()]
    if len(others) == len(paths):
        return paths
    for path in others:
        print(f"{PROG}: {path} holds no run")
    return [path for path in paths if path not in others]


def draw_curves(runs: list[Run], options: Options, out: Path) -> list[Path]:
    """Wall time and simulated time are never on one axis."""
    written = []
    for x in dict.fromkeys(options.x):
        groups: list[tuple[str, list[Run]]] = [("iteration", runs)]
        if x == "time":
            groups = [(c, [run for run in runs if run.clock == c]) for c in ("wall", "simulated")]
        for name, group in groups:
            if group:
                title, stem = labels.title(group), out / f"curves-{name}"
                written += curves.save(group, x, stem, options.format, title, options.smooth)
    return written


def read_timelines(runs: list[Run], options: Options) -> list[timeline.Timeline]:
    traced = [run for run in runs if run.trace is not None]
    if not traced and (options.rounds or options.ranks):
        raise UserError("--rounds and --ranks need a trace: train with --trace writes one.")
    without = dict.fromkeys(str(run.path) for run in runs if run.trace is None)
    if without:
        print(f"{PROG}: no timeline of {', '.join(without)}: train with --trace writes one")
    found = []
    for run in traced:
        try:
            found.append(timeline.read(run, options.window(), options.ranks))
        except timeline.TooShort as error:  # as of a run resumed at its end; it still has curves
            if options.rounds or options.ranks:
                raise
            print(f"{PROG}: no timeline: {error}")
    return found


if __name__ == "__main__":
    cli.run(main, Options, prog=PROG)
