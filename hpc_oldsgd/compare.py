"""`simulate --algorithm all`: every registered algorithm on one task, a table and a figure."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import algorithms, cli, metrics, runs, tasks
from .config import SimulateOptions
from .errors import Diverged, UserError
from .plot import curves, style
from .plot.folders import Run

PROG = "hpc_oldsgd.simulate"


def compare(argv: list[str]) -> Path:
    """Algorithm options such as --tau go to those that have them."""
    from .simulate import Simulation

    base = algorithms.registry()["oldsgd"]
    shared = [base.name if word == "all" else word for word in argv]
    shared = [word.replace("--algorithm=all", f"--algorithm={base.name}") for word in shared]
    config, chosen = cli.parse_staged(
        SimulateOptions, {"algorithm": {base.name: base}, "task": tasks.registry()}, shared,
        prog=PROG,
    )  # fmt: skip
    if config.threads:
        torch.set_num_threads(config.threads)
    tau, task = chosen["algorithm"].tau, chosen["task"]
    path = config.out or runs.folder_for(
        dataclasses.replace(config, algorithm="all"), config.agents
    )
    metrics.prepare(path, config.overwrite)
    results: dict[str, list[dict[str, Any]]] = {}
    notes: dict[str, str] = {}
    bar = tqdm(algorithms.registry().items(), disable=not sys.stderr.isatty())
    for name, kind in bar:
        bar.set_description(name)
        try:
            algorithm = kind(tau=tau)
        except UserError:  # dsgd and dsgd_cta take one step a round
            algorithm = kind()
        simulation = Simulation(config, algorithm, task)
        try:
            results[name] = simulation.run()
        except Diverged:
            results[name], notes[name] = simulation.training.rows, "diverged"
        if not sys.stderr.isatty():
            print(f"{PROG}: {name} done", flush=True)
    table = make_table(results, notes, task.primary[0])
    (path / "compare.md").write_text(table + "\n")
    (path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(metrics.clean({"algorithm": name, **row})) + "\n"
            for name, rows in results.items()
            for row in rows
        )
    )
    print(table)
    title = f"{task.name}, {config.topology}, n = {config.agents}, τ = {tau}, c = {config.c:g}"
    drawn = draw(results, title, path / "compare")
    hint = "" if drawn or style.available() else ' (no figure: pip install "hpc_oldsgd[plots]")'
    print(f"\nwritten to {path}{hint}")
    return path


def make_table(
    results: dict[str, list[dict[str, Any]]], notes: dict[str, str], primary: str
) -> str:
    label = primary.replace("_", " ")
    lines = [
        f"| algorithm | simulated time | f(xbar) | {label} | consensus | hidden |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in results.items():
        if not rows:
            lines.append(f"| {name} | {notes.get(name, '')} | | | | |")
            continue
        last = rows[-1]
        hidden = "" if last["hidden"] is None else f"{last['hidden']:.0%}"
        note = f" ({notes[name]})" if name in notes else ""
        lines.append(
            f"| {name}{note} | {last['time']:.0f} | {last['train_loss']:.4f} "
            f"| {last[primary]:.4g} | {last['consensus']:.1e} | {hidden} |"
        )
    return "\n".join(lines)


def draw(results: dict[str, list[dict[str, Any]]], title: str, stem: Path) -> bool:
    lines = [
        Run(stem, rows, "simulated", label=name, line=k)
        for k, (name, rows) in enumerate(results.items())
        if rows
    ]
    if not lines or not style.available():
        return False
    curves.save(lines, "time", stem, ("png", "svg"), title)
    return True
