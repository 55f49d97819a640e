"""Bad input under mpirun: one line on rank 0, one exit code on all ranks, nothing overwritten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd.checkpoints.store import newest_first
from support import ROOT
from support.bad_input import TOPOLOGIES, contents

Mpirun = Callable[..., "subprocess.CompletedProcess[str]"]
JOBS = ("-m", "support.bad_input")
SHORT = ["--task", "logistic", "--iterations", "40", "--tau", "2", "--checkpoint-every", "2"]
pytestmark = pytest.mark.skipif("PMI_RANK" in os.environ, reason="starts jobs of its own")


def test_bad_input_over_mpi(mpirun: Mpirun, tmp_path: Path) -> None:
    """Each case is refused by all ranks alike, so one job can try them all."""
    run, notes, broken = tmp_path / "run", tmp_path / "notes", tmp_path / "broken"
    notes.mkdir()
    (notes / "diary.txt").write_text("not a run")
    (tmp_path / "link").symlink_to(run)
    cases: list[tuple[dict[str, Any], int, str]] = [
        # rank 1's disk is full after the first checkpoint: the run goes on to its end
        ({"words": [*SHORT, "--out", str(run)], "full": 1}, 0, "rank 1: File too large"),
        ({"words": [*SHORT, "--out", str(run)]}, 2, "holds a run: add --resume auto"),
        ({"words": [*SHORT, "--out", str(tmp_path / "link"), "--overwrite"]}, 2, "is a link"),
        ({"words": [*SHORT, "--out", str(notes), "--overwrite"]}, 2, "something else than a run"),
        ({"words": [*SHORT, "--out", str(notes / "diary.txt")]}, 2, "is a file"),
        ({"words": [*SHORT, "--out", str(notes / "diary.txt" / "x")]}, 2, "Not a directory"),
        ({"words": ["--tau", "0"]}, 2, "tau must be at least 1, not 0"),
        ({"words": ["--topology", "hypercube"]}, 2, "A hypercube needs a power of two agents"),
        ({"words": ["--on-failure", "shrink"]}, 2, "--on-failure shrink"),
        ({"words": ["--resume", str(tmp_path / "none")]}, 2, "there is no such folder"),
        ({"words": ["--task", "wikitext2-gpt2", "--data-dir", str(notes)]}, 2, "is not in"),
        ({"words": ["--task", "tiny"]}, 2, "3 agents cannot share 2 training samples"),
        ({"words": ["--task", "infinite-data"]}, 2, "sample 7 holds NaN or infinity"),
        ({"words": ["--task", "not-a-number"]}, 2, "bias holds NaN or infinity already"),
        ({"words": ["--task", "no-parameters"]}, 2, "no parameters that require a gradient"),
        ({"words": ["--task", "no-test"]}, 2, "the test set of NoTest is empty"),
        ({"words": ["--task", "two-types"]}, 2, "1.weight is torch.float64 on cpu"),
        ({"words": ["--task", "two-devices"]}, 2, "1.weight is torch.float32 on meta"),
        ({"words": [*SHORT, "--alpha", "1e30"]}, 3, "not finite or exploded near iteration"),
    ]  # fmt: skip
    for name, (text, said) in TOPOLOGIES.items():
        (tmp_path / name).write_text(text)
        cases.append(({"words": [*SHORT, "--topology", str(tmp_path / name)]}, 2, said))
    for case, _, _ in cases:
        if "--out" not in case["words"]:
            case["words"] += ["--out", str(tmp_path / "new")]
    made = [*SHORT, "--out", str(broken), "--keep", "1"]
    damaged = {"words": [*made, "--resume", "auto"], "cut": "rank-00001.safetensors"}
    cases += [({"words": made}, 0, ""), (damaged, 2, r"no checkpoint in .* is usable \(rank 1: ")]

    (tmp_path / "cases.json").write_text(json.dumps([case for case, _, _ in cases]))
    job = mpirun(3, *JOBS, tmp_path / "cases.json", timeout_s=200)
    assert job.returncode == 0 and "Traceback" not in job.stderr, job.stderr
    blocks = job.stderr.split("=== ")
    assert len(blocks) == len(cases) + 1
    for k, (case, code, said) in enumerate(cases):
        before = blocks[k].split("\n", 1)[-1] if k else blocks[0]
        lines = [line for line in before.splitlines() if line.startswith("hpc_oldsgd.train: ")]
        lines = [line for line in lines if "trying the one before" not in line]
        codes = blocks[k + 1].split("\n", 1)[0].split()
        assert codes == [str(code)] * 3, (case, codes, before)
        assert re.search(said, before), (case, before)
        assert code == 0 or len(lines) == 1, (case, before)
    assert (notes / "diary.txt").read_text() == "not a run" and len(contents(notes)) == 1
    valid = newest_first(run)
    assert valid and all((folder / "manifest.json").exists() for folder in valid)
    (start,) = tmp_path.glob("new/*/*/manifest.json")  # all that the one that diverged has left
    assert start.parent.name == "round-00000000"


def test_no_mpi() -> None:
    # What every command line does when it first needs MPI, without the seconds that torch takes.
    code = "from hpc_oldsgd import cli\nwith cli.guard('train'):\n    from mpi4py import MPI"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("train: mpi4py finds no MPI library: load your site's MPI module")
