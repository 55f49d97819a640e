"""Ranks that were not started alike are refused, and the rank and the option are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.jobs import TRAIN, Mpirun

SHORT = ["--task", "logistic", "--tau", "2", "--checkpoint-every", "2"]


def test_ranks_that_disagree_are_refused(mpirun: Mpirun, tmp_path: Path) -> None:
    """Rank 2 alone has another value in each of these runs, which one job tries one by one."""
    cases = {
        "seed": ("0", "1"),
        "alpha": ("0.1", "0.2"),
        "momentum": ("0.0", "0.9"),
        "batch": ("8", "4"),
        "partition": ("iid", "label:0.7"),
        "iterations": ("40", "60"),
        "eval-every": ("1", "2"),
        "checkpoint-every": ("2", "3"),
        "topology": ("ring", "complete"),
        "tau": ("2", "3"),
        "algorithm": ("oldsgd", "ldsgd"),
        "task": ("digits", "logistic"),
        "out": (str(tmp_path / "a"), str(tmp_path / "b")),
    }
    ours: list[str] = []
    theirs: list[str] = []
    for name, (a, b) in cases.items():
        for words, value in ((ours, a), (theirs, b)):
            out = [] if name == "out" else ["--out", str(tmp_path / "new")]
            words += [*SHORT, "--iterations", "40", *out, f"--{name}", value, "--"]
    same = ["--threads", "2"]  # need not be alike, as little as the place of the data
    last = [*SHORT, "--iterations", "4", "--out", str(tmp_path / "run")]
    other = [":", "-n", "1", sys.executable, *TRAIN, *theirs, *last, *same]
    job = mpirun(2, *TRAIN, *ours, *last, *other, timeout_s=200)
    assert job.returncode == 0, job.stderr
    *outputs, _ = re.split(r"^=== (.*)\n", job.stderr, flags=re.M)
    for (name, (a, b)), output, codes in zip(
        cases.items(), outputs[::2], outputs[1::2], strict=True
    ):
        assert codes.split() == ["2"] * 3, (name, codes, output)
        says = f"hpc_oldsgd.train: rank 2 has --{name} {b}, rank 0 --{name} {a}: start all ranks "
        assert says in output and output.count("\n") == 1, (name, output)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_ranks_with_other_data_are_refused(mpirun: Mpirun, tmp_path: Path) -> None:
    """The last of three ranks reads labels of its own."""
    words = ["--task", "own-labels", "--out", str(tmp_path / "run")]
    job = mpirun(3, *TRAIN, *words)
    assert job.returncode == 2 and not (tmp_path / "run").exists(), job.stderr
    says = "hpc_oldsgd.train: rank 2 has other training data than rank 0: "
    assert says in job.stderr and job.stderr.count("\n") == 1, job.stderr
