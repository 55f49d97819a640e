"""python -m hpc_oldsgd.data --partition label:0.7: who gets which labels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .. import cli, tasks
from . import histogram
from .partition import parse

PROG = "hpc_oldsgd.data"


@dataclass(kw_only=True)
class Options:
    """Print and draw how many samples of each label every agent gets."""

    task: str = "digits"
    """Model and data; adds options of its own, listed below."""
    partition: str = "iid"
    """How the data is split: iid, label:SHARE (the paper's heterogeneous case is label:0.7),
    dirichlet:ALPHA."""
    agents: int = 9
    """Number of agents."""
    seed: int = 0
    """The run's seed."""
    plot: Path | None = None
    """Draw the histograms into this file (.png, .pdf or .svg)."""
    json: bool = False
    """Print one line of JSON with all counts."""


def main() -> None:
    with cli.guard(PROG):
        options, chosen = cli.parse_staged(Options, {"task": tasks.registry()}, prog=PROG)
        task: tasks.Task = chosen["task"]
        labels = task.labels()
        table = histogram.counts(
            labels, parse(options.partition).split(labels, options.agents, options.seed)
        )
        names = task.label_names or [str(label) for label in range(table.shape[1])]
        title = f"{options.task}, {options.partition}, {options.agents} agents, seed {options.seed}"
        if options.json:
            print(json.dumps({"labels": list(names), "counts": table.tolist()}))
        else:
            print(title, histogram.text(table, names), sep="\n")
            print(
                "skew: distance of an agent's labels to all labels; 0 is iid, 1 nothing in common"
            )
        if options.plot is not None:
            histogram.save(table, names, title, options.plot)


if __name__ == "__main__":
    main()
