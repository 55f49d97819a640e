"""Run folders to tables and figures: of a job array, a scaling job or runs by hand.

Reads folders only: no training code, no torch, so it runs on a login node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import cli
from ..errors import UserError
from ..plot import curves, labels, style
from ..runs import reader
from ..runs.reader import Run, finite
from ..training import target
from ..training.whole_run import totals, training_s
from . import more_agents
from .tables import (
    Record,
    Table,
    as_csv,
    cell,
    grouped,
    markdown,
    pivot,
    ratio,
    short_markdown,
    sooner,
)  # fmt: skip

__all__ = [
    "Options", "Record", "Table", "as_csv", "cell", "first", "grouped", "main", "markdown",
    "overlap_result", "pivot", "ratio",
]  # fmt: skip

PROG = "hpc_oldsgd.study collect"
LINES = 12  # in one figure; of more runs the best tau of each algorithm is drawn
# What a task is judged by, and the target when none is given, as a share of the best value.
JUDGED: dict[str, tuple[target.Direction, float]] = {
    "test_accuracy": ("max", 0.95), "test_perplexity": ("min", 1.1), "test_loss": ("min", 1.1),
    "train_loss": ("min", 1.1),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Tables (Markdown, CSV) and figures of all runs in a folder; they may still be going."""

    folder: cli.Positional[Path]
    """The folder; runs are found at any depth."""
    out: Path | None = None
    """Folder for the results; the same folder if not given."""
    target: float | None = None
    """Test accuracy, as 0.9, or perplexity to reach; if not given 95% of the best accuracy among
    the runs of a task, or 1.1 times the best perplexity."""
    figures: bool = True
    """Draw the curves."""


def main(options: Options) -> None:
    if not options.folder.is_dir():
        raise UserError(f"There is no folder {options.folder}.")
    damaged: list[UserError] = []
    runs = read(options.folder, damaged)
    overlap = overlaps(options.folder, damaged)
    if not runs and not overlap:
        raise next(iter(damaged), UserError(f"There is no run in {options.folder} yet."))
    records = [record(run, options.folder) for run in runs]
    add_targets(runs, records, options.target)
    tables = {
        "runs": ("All runs", records),
        "scaling": ("More agents", more_agents.scaling(records)),
        "algorithms": ("Algorithms, each at its best tau", best(records)),
        "overlap": ("Hidden communication", overlap),
    }
    out = options.out or options.folder
    text = [f"# {options.folder.resolve().name}", ""]
    out.mkdir(parents=True, exist_ok=True)
    for name, (title, table) in tables.items():
        if table:
            (out / f"{name}.csv").write_text(as_csv(table))
            text += [f"## {title}", "", short_markdown(table), "", *notes(table)]
    text += [f"Left out: {error}\n" for error in damaged]
    print("\n".join(text))
    if options.figures and style.available():
        drawn = more_agents.draw(tables["scaling"][1], out) + draw(runs, records, out)
        text += ["## Figures", "", *(f"![{p.stem}]({p.name})" for p in drawn), ""] if drawn else []
    (out / "report.md").write_text("\n".join(text))
    hint = "" if style.available() else ' (no figures: pip install "hpc_oldsgd[plots]")'
    print(f"written to {out}/report.md{hint}")


# --- reading ------------------------------------------------------------------------------------
def read(folder: Path, damaged: list[UserError]) -> list[Run]:
    found = sorted(p.parent for p in folder.rglob("metrics.jsonl"))
    for path in found:
        if (path / "diverged").exists() and not (path / "metrics.jsonl").stat().st_size:
            damaged.append(UserError(f"{path} diverged before its first row."))
    begun = [path for path in found if (path / "metrics.jsonl").stat().st_size]
    return [run for run in read_all(begun, reader.read_one, damaged) if run.rows]


def read_all(
    paths: Iterable[Path], reads: Callable[[Path], list[Any]], damaged: list[UserError]
) -> list[Any]:
    """A damaged folder is noted, and the others are still read."""
    found = []
    for path in paths:
        try:
            found += reads(path)
        except UserError as error:
            damaged.append(error)
    return found


def record(run: Run, top: Path) -> Record:
    """A line of the table of runs. Times are seconds, or units of a gradient when simulated."""
    known, last, whole = labels.settings(run), run.rows[-1], totals(run.rows)
    judged = next((key for key in JUDGED if run.has(key)), "train_loss")
    diverged = (run.path / "diverged").exists()
    return {
        "run": str(run.path.relative_to(top)),
        **{k: known.get(k) for k in ("algorithm", "task", "partition", "topology", "agents")},
        "tau": known.get("tau"),
        "fragments": P if (P := known.get("fragments", 1)) > 1 else None,
        **{k: known.get(k) for k in ("c", "alpha")},
        "state": "diverged" if diverged else "done" if run.ended else "unfinished",
        "iteration": last["iteration"],
        "time": last.get("time"),
        "training_time": whole["training_s"] if run.clock == "wall" else None,
        "clock": run.clock,
        "train_loss": last.get("train_loss"),
        "judged_by": judged,
        "value": last.get(judged),
        "consensus": last.get("consensus"),
        **{k: whole[k] for k in ("step_s", "samples_per_s", "hidden")},
    }


def overlaps(folder: Path, damaged: list[UserError]) -> Table:
    """What `bench overlap --json` printed last into overlap.txt."""

    def read_one(path: Path) -> Table:
        try:
            content = overlap_result(path)
            settings, results = content["settings"], content["results"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} does not end with the line that --json prints.") from None
        keys = ("tau", "round_s", "ratio_to_ideal", "transfer_s", "exposed_s", "hidden")
        return [
            {
                "run": str(path.relative_to(folder)),
                "algorithm": result["algorithm"],
                "ranks": settings["ranks"],
                "hosts": settings["hosts"],
                "MB": settings["model_bytes"] / 1e6,
                "mpi": settings["mpi"],
                **{key: result[key] for key in keys},
            }
            for result in results
        ]

    return read_all(sorted(folder.rglob("overlap.txt")), read_one, damaged)


def overlap_result(path: Path) -> dict[str, Any]:
    """The last line of what `bench overlap --json` printed."""
    content: dict[str, Any] = json.loads(path.read_text().rstrip().rsplit("\n", 1)[-1])
    return content


# --- tables -------------------------------------------------------------------------------------
def add_targets(runs: Sequence[Run], records: Table, wanted: float | None) -> None:
    """How long each run took to the target of its task; on a wall clock also without measuring."""
    by_task = _of("task", "partition", "judged_by")
    for key, group in grouped(zip(runs, records, strict=True), by_task).items():
        judged = key[-1]
        direction, share = JUDGED[judged]
        sound = [run for run, line in group if line["state"] != "diverged"]
        reached = target.best((v for run in sound for v in run.values(judged)), direction)
        goal = wanted if wanted is not None or reached is None else share * reached
        for run, line in group:
            line["target"] = goal
            line["time_to_target"] = line["training_to_target"] = None
            if goal is not None and line["state"] != "diverged":
                row = first(run, goal, judged, direction) or {}
                line["time_to_target"] = row["time"] if finite(row.get("time")) else None
                if row and run.clock == "wall":
                    line["training_to_target"] = training_s(run.rows)[run.rows.index(row)]


def first(run: Run, goal: float, key: str, direction: target.Direction) -> Record | None:
    """The first row that meets the target."""
    pairs = zip(run.rows, run.values(key), strict=True)
    return next((row for row, value in pairs if target.met(goal, value, direction)), None)


def best(records: Table) -> Table:
    """Of each algorithm the tau, and the fragments, that were first at the target, and how much
    faster OLDSGD was."""
    table: Table = []
    keys = ("task", "partition", "topology", "agents", "c", "clock")
    for group in grouped(records, _of(*keys)).values():
        by_name = grouped(group, lambda r: r["algorithm"])
        fastest = {name: min(same, key=_by_target) for name, same in by_name.items()}
        if len(fastest) < 2:
            continue
        ours = fastest.get("oldsgd", {})
        for name, line in fastest.items():
            shown = {"algorithm": name, **{k: line[k] for k in keys[:-1]}}
            reached = ("time_to_target", "training_to_target")
            shown |= {k: line[k] for k in ("tau", "fragments", "value", "target", *reached)}
            table.append({**shown, "speedup_of_oldsgd": sooner(line, ours)})
    return table


def _of(*keys: str) -> Callable[[Any], tuple[Any, ...]]:
    """These columns of a record, or of a pair of a run and its record."""
    return lambda one: tuple((one[1] if isinstance(one, tuple) else one)[k] for k in keys)


def _by_target(line: Record) -> tuple[bool, float, float]:
    """The earliest at the target, else the lowest loss; what diverged comes last."""
    time, loss = line["time_to_target"], line["train_loss"]
    return (
        line["state"] == "diverged",
        float("inf") if time is None else time,
        float("inf") if loss is None else loss,
    )


def notes(table: Table) -> list[str]:
    """What the columns of this very table need said about them."""
    has = {k for line in table for k, value in line.items() if value is not None}
    said = []
    if "samples_per_s" in has and "weak_efficiency" in has:
        said.append(
            "Weak scaling: every agent keeps its batch. 100% means that samples per second grow "
            "as the number of agents."
        )
    if "strong_efficiency" in has:
        said.append(
            "Strong scaling: the time to one target. 100% means that it falls as the number of "
            "agents grows."
        )
    training = "training_to_target" in has
    if training:
        said.append("training_to_target leaves out measuring and saving.")
    if has & {"speedup", "speedup_of_oldsgd"}:
        said.append(f"Speed-ups are ratios of {'training' if training else 'time'}_to_target.")
    if "time_to_target" in has and any(line["time_to_target"] is None for line in table):
        said.append("A dash: the run did not reach the target.")
    return [" ".join(said), ""] if said else []


# --- writing ------------------------------------------------------------------------------------
def draw(runs: Sequence[Run], records: Table, out: Path) -> list[Path]:
    """Against iterations and time; one figure for each task and, when simulated, each c."""
    drawn: list[Path] = []
    pairs = zip(runs, records, strict=True)
    for key, group in grouped(pairs, _of("task", "partition", "clock", "c")).items():
        if len(group) > LINES:
            of = grouped(group, _of("algorithm", "agents"))
            group = [min(same, key=lambda p: _by_target(p[1])) for same in of.values()]
        chosen = [run for run, _ in group]
        labels.tell_apart(chosen)
        *names, c = key
        parts = [str(k).replace(":", "").replace("/", "_") for k in names]
        parts += [] if c is None else [f"c{c:g}"]
        axes: tuple[curves.X, ...] = ("iteration", "time")
        for x in axes:
            stem = out / "-".join([x, *parts])
            drawn += curves.save(chosen, x, stem, ("png", "svg"), labels.title(chosen))
    return [path for path in drawn if path.suffix == ".png"]
