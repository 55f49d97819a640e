"""Run folders to tables and figures: of a job array, a scaling job or runs by hand.

Reads folders only: no training code, no torch, so it runs on a login node.
"""

from __future__ import annotations

import csv
import io
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

PROG = "hpc_oldsgd.study collect"
LINES = 12  # in one figure; of more runs the best tau of each algorithm is drawn
# What a task is judged by, and the target when none is given, as a share of the best value.
JUDGED: dict[str, tuple[target.Direction, float]] = {
    "test_accuracy": ("max", 0.95), "test_perplexity": ("min", 1.1), "test_loss": ("min", 1.1),
    "train_loss": ("min", 1.1),
}  # fmt: skip
SCALING = (
    "algorithm", "task", "topology", "agents", "tau", "fragments", "c", "alpha", "value", "step_s",
    "hidden", "time_to_target",
)  # fmt: skip

Record = dict[str, Any]
Table = list[Record]


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
        "scaling": ("More agents", scaling(records)),
        "algorithms": ("Algorithms, each at its best tau", best(records)),
        "overlap": ("Hidden communication", overlap),
    }
    out = options.out or options.folder
    text = [f"# {options.folder.resolve().name}", ""]
    out.mkdir(parents=True, exist_ok=True)
    for name, (title, table) in tables.items():
        if table:
            (out / f"{name}.csv").write_text(as_csv(table))
            text += [f"## {title}", "", short_markdown(table), ""]
    text += ["Speed-ups are ratios of the time to the target.", ""] if len(records) > 1 else []
    text += [f"Left out: {error}\n" for error in damaged]
    print("\n".join(text))
    if options.figures and style.available():
        drawn = draw(runs, records, out)
        text += ["## Curves", "", *(f"![{p.stem}]({p.name})" for p in drawn), ""] if drawn else []
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
    known, last = labels.settings(run), run.rows[-1]
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
        "clock": run.clock,
        "train_loss": last.get("train_loss"),
        "judged_by": judged,
        "value": last.get(judged),
        "consensus": last.get("consensus"),
        "step_s": last.get("step_s"),
        "hidden": last.get("hidden"),
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
    """How long each run took to the target of its task."""
    by_task = _of("task", "partition", "judged_by")
    for key, group in grouped(zip(runs, records, strict=True), by_task).items():
        judged = key[-1]
        direction, share = JUDGED[judged]
        sound = [run for run, line in group if line["state"] != "diverged"]
        reached = target.best((v for run in sound for v in run.values(judged)), direction)
        goal = wanted if wanted is not None or reached is None else share * reached
        for run, line in group:
            line["target"] = goal
            line["time_to_target"] = None
            if goal is not None and line["state"] != "diverged":
                row = first(run, goal, judged, direction) or {}
                line["time_to_target"] = row["time"] if finite(row.get("time")) else None


def first(run: Run, goal: float, key: str, direction: target.Direction) -> Record | None:
    """The first row that meets the target."""
    pairs = zip(run.rows, run.values(key), strict=True)
    return next((row for row, value in pairs if target.met(goal, value, direction)), None)


def scaling(records: Table) -> Table:
    """Runs that differ in the number of agents, and in alpha where it grows with them, against
    the smallest of them."""
    table: Table = []
    keys = ("algorithm", "task", "partition", "tau", "fragments", "c", "clock")
    groups: list[Table] = []
    for same in grouped(
        records, lambda r: (str(r["topology"]).split(":")[0], *(r[k] for k in keys))
    ).values():
        # Where a number of agents ran with several step sizes, each rule by which they grow is a
        # line of its own.
        alphas = grouped(same, lambda r: r["agents"]).values()
        several = any(len({r["alpha"] for r in some}) > 1 for some in alphas)
        groups += by_rule(same) if several else [same]
    for group in groups:
        group.sort(key=lambda r: r["agents"] or 0)
        if len({r["agents"] for r in group}) < 2:
            continue
        for line in group:
            shown = {k: line[k] for k in SCALING}
            shown["speedup"] = ratio(group[0]["time_to_target"], line["time_to_target"])
            shown["against"] = f"{group[0]['agents']} agents"
            table.append(shown)
    return table


def by_rule(records: Table) -> list[Table]:
    """Those of one alpha, of alpha / n, and of alpha / sqrt(n), where several n have it."""
    groups: list[Table] = []
    for power in (0.0, 1.0, 0.5):
        start = [f"{r['alpha'] / r['agents'] ** power:.6g}" for r in records]
        for same in grouped(zip(start, records, strict=True), lambda pair: pair[0]).values():
            groups.append([r for _, r in same])
    return [group for group in groups if len({r["agents"] for r in group}) > 1]


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
        ours = fastest.get("oldsgd", {}).get("time_to_target")
        for name, line in fastest.items():
            shown = {"algorithm": name, **{k: line[k] for k in keys[:-1]}}
            shown |= {k: line[k] for k in ("tau", "fragments", "value", "target", "time_to_target")}
            table.append({**shown, "speedup_of_oldsgd": ratio(line["time_to_target"], ours)})
    return table


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def pivot(cells: Iterable[tuple[Record, str, Any]]) -> Table:
    """(head, column, value) -> a line for each head, with the values of its columns after it."""
    lines: dict[tuple[Any, ...], Record] = {}
    for head, column, value in cells:
        lines.setdefault(tuple(head.values()), head)[column] = value
    columns = dict.fromkeys(k for line in lines.values() for k in line)
    return [{k: line.get(k) for k in columns} for line in lines.values()]


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


def short_markdown(table: Table) -> str:
    """What all lines of several share stands above them, once; what none has is left out."""
    known = [k for k in table[0] if any(r[k] is not None for r in table)]
    same = [k for k in known if len(table) > 1 and len({str(r[k]) for r in table}) == 1]
    above = ", ".join(f"{k} {cell(k, table[0][k])}" for k in same)
    rest = markdown([{k: r[k] for k in known if k not in same} for r in table])
    return f"All: {above}.\n\n{rest}" if same else rest


def markdown(table: Table) -> str:
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([cell(k, r[k]) for k in head] for r in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if key == "hidden" else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def as_csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
