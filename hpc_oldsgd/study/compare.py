"""`simulate --algorithm all`: every registered algorithm on one task, a table and a figure."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import algorithms, cli, tasks
from ..algorithms import Algorithm
from ..cli.fields import flags
from ..errors import Diverged, UserError
from ..files import write_atomically
from ..plot import curves, style
from ..runs import folder as run_folder
from ..runs.backend import Stacked
from ..runs.reader import Run
from ..runs.session import Session
from ..runs.spec import Spec, take_choice
from ..tasks import Task
from ..training.options import SimulateOptions
from ..training.whole_run import totals

PROG = "hpc_oldsgd.simulate"
BASE = "oldsgd"  # whose options --help shows, and whose tau is that of all
Rows = list[dict[str, Any]]


def compare(argv: list[str]) -> Path:
    """Algorithm options such as --tau and --eta-s go to those that have them."""
    asked = take_choice(argv)[1]
    if "fragments" in asked:
        raise UserError("--algorithm all compares with given fragments: give --fragments a number")
    if "tau" in asked:
        raise UserError("--algorithm all compares the algorithms at one tau: give --tau a number")
    config, chosen, task = read_options(argv)  # all of them, before anything is written
    path = run_folder.folder_for(dataclasses.replace(config, algorithm="all"), config.agents)
    run_folder.prepare(path, config.overwrite)
    results: dict[str, Rows] = {}
    notes: dict[str, str] = {}
    refused: list[UserError] = []
    bar = tqdm(chosen.items(), disable=not sys.stderr.isatty())
    for name, algorithm in bar:
        bar.set_description(name)
        session = None
        try:
            session = Session(Spec(config, algorithm, task), Stacked(config), in_folder=False)
            results[name] = session.run()
        except Diverged:
            results[name] = [] if session is None else session.loop.rows
            notes[name] = "diverged"
        except UserError as error:  # --late reuse, say, fits those with neighbours alone
            results[name], notes[name] = [], str(error)
            refused.append(error)
        if len(refused) < len(results):
            write(path, results, notes, task.primary[0])
        if not sys.stderr.isatty():
            print(f"{PROG}: {name} {notes.get(name, 'done')}", flush=True)
    if len(refused) == len(results):
        raise refused[0]
    print(make_table(results, notes, task.primary[0]))
    tau = chosen[BASE].tau
    title = f"{task.name}, {config.topology}, n = {config.agents}, τ = {tau}, c = {config.c:g}"
    drawn = draw(results, title, path / "compare")
    hint = "" if drawn or style.available() else ' (no figure: pip install "hpc_oldsgd[plots]")'
    print(f"\nwritten to {path}{hint}")
    return path


def read_options(argv: list[str]) -> tuple[SimulateOptions, dict[str, Algorithm], Task]:
    """The run's options, and every algorithm with those of its own."""
    known = algorithms.registry()
    every = set[str]().union(*map(flags, known.values()))

    def parse(name: str, leave: set[str]) -> tuple[SimulateOptions, dict[str, Any]]:
        own: Any = {"algorithm": {name: known[name]}, "task": tasks.registry()}
        return cli.parse_staged(SimulateOptions, own, words_for(argv, name, leave), prog=PROG)

    config, base = parse(BASE, every - flags(known[BASE]))
    made: dict[str, Algorithm] = {}
    for name, kind in known.items():
        leave = every - flags(kind)
        if algorithms.with_tau(name, base["algorithm"].tau) is None:
            leave.add("--tau")
        made[name] = parse(name, leave)[1]["algorithm"]
    return config, made, base["task"]


def words_for(argv: list[str], algorithm: str, leave: set[str]) -> list[str]:
    """The command line of one algorithm, without the options that are not its own."""
    return [*cli.without(argv, {*leave, "--algorithm"}), "--algorithm", algorithm]


def write(path: Path, results: dict[str, Rows], notes: dict[str, str], primary: str) -> None:
    """What there is so far, each file whole or not at all: a long comparison may be cut short."""
    rows = (
        json.dumps(run_folder.clean({"algorithm": name, **row})) + "\n"
        for name, some in results.items()
        for row in some
    )
    table = make_table(results, notes, primary) + "\n"
    for name, text in (("metrics.jsonl", "".join(rows)), ("compare.md", table)):
        write_atomically(path / name, text)


def make_table(results: dict[str, Rows], notes: dict[str, str], primary: str) -> str:
    label = primary.replace("_", " ")
    lines = [
        f"| algorithm | simulated time | f(xbar) | {label} | consensus | hidden |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in results.items():
        if not rows:
            note = notes.get(name, "").replace("|", "\\|")
            lines.append(f"| {name} | {note} | | | | |")
            continue
        last, share = rows[-1], totals(rows)["hidden"]
        hidden = "" if share is None else f"{share:.0%}"
        note = f" ({notes[name]})" if name in notes else ""
        lines.append(
            f"| {name}{note} | {last['time']:.0f} | {last['train_loss']:.4f} "
            f"| {last[primary]:.4g} | {last['consensus']:.1e} | {hidden} |"
        )
    return "\n".join(lines)


def draw(results: dict[str, Rows], title: str, stem: Path) -> bool:
    lines = [
        Run(stem, rows, "simulated", label=name, line=k)
        for k, (name, rows) in enumerate(results.items())
        if rows
    ]
    if not lines or not style.available():
        return False
    curves.save(lines, "time", stem, ("png", "svg"), title)
    return True
