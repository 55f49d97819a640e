"""Bad input under mpirun: one line on rank 0, one exit code on all ranks, nothing overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hpc_oldsgd.checkpoints.store import newest_first
from support import ROOT
from support.bad_input import TOPOLOGIES
from support.jobs import TRAIN, Mpirun
from support.runs import contents

SHORT = ["--task", "logistic", "--iterations", "40", "--tau", "2", "--checkpoint-every", "2"]


def test_bad_input_over_mpi(mpirun: Mpirun, tmp_path: Path) -> None:
    """Each case is refused by all ranks alike, so one job can try them all."""
    run, notes, full = tmp_path / "run", tmp_path / "notes", tmp_path / "full"
    notes.mkdir()
    (notes / "diary.txt").write_text("not a run")
    (tmp_path / "link").symlink_to(run)
    cases: list[tuple[list[str], int, str]] = [
        ([*SHORT, "--out", str(run), "--keep", "1"], 0, ""),
        ([*SHORT, "--out", str(run)], 2, "holds a run: add --resume auto"),
        ([*SHORT, "--out", str(tmp_path / "link"), "--overwrite"], 2, "is a link"),
        ([*SHORT, "--out", str(notes), "--overwrite"], 2, "something else than a run"),
        ([*SHORT, "--out", str(notes / "diary.txt")], 2, "is a file"),
        ([*SHORT, "--out", str(notes / "diary.txt" / "x")], 2, "Not a directory"),
        (["--tau", "0"], 2, "tau must be at least 1, not 0"),
        (["--topology", "hypercube"], 2, "A hypercube needs a power of two agents"),
        (["--on-failure", "shrink"], 2, "--on-failure shrink"),
        (["--resume", str(tmp_path / "none")], 2, "there is no such folder"),
        (["--task", "wikitext2-gpt2", "--data-dir", str(notes)], 2, "is not in"),
        (["--task", "tiny"], 2, "3 agents cannot share 2 training samples"),
        (["--task", "infinite-data"], 2, "sample 7 holds NaN or infinity"),
        (["--task", "not-a-number"], 2, "bias holds NaN or infinity already"),
        (["--task", "no-parameters"], 2, "no parameters that require a gradient"),
        (["--task", "no-test"], 2, "the test set of NoTest is empty"),
        (["--task", "two-types"], 2, "1.weight is torch.float64 on cpu"),
        (["--task", "two-devices"], 2, "1.weight is torch.float32 on meta"),
        ([*SHORT, "--alpha", "1e30"], 3, "not finite or exploded near iteration"),
    ]
    for name, (text, said) in TOPOLOGIES.items():
        (tmp_path / name).write_text(text)
        cases.append(([*SHORT, "--topology", str(tmp_path / name)], 2, said))
    words: list[str] = []
    for case, _, _ in cases:
        words += [*case, *([] if "--out" in case else ["--out", str(tmp_path / "new")]), "--"]

    # In the last run rank 1's disk is full after the first checkpoint: it goes on to its end, and
    # then says that the last checkpoint is missing.
    words += [*SHORT, "--out", str(full)]
    job = mpirun(3, *TRAIN, *words, timeout_s=200, FAULT="full-disk:1:0")
    assert job.returncode == 5 and "Traceback" not in job.stderr, job.stderr
    *outputs, last = re.split(r"^=== (.*)\n", job.stderr, flags=re.M)
    assert "rank 1: File too large" in last
    assert last.count("the run is complete but could not write the last checkpoint: ") == 1
    for (case, code, said), output, codes in zip(cases, outputs[::2], outputs[1::2], strict=True):
        assert codes.split() == [str(code)] * 3, (case, codes, output)
        assert re.search(said, output), (case, output)
        assert code == 0 or output.count("hpc_oldsgd.train: ") == 1, (case, output)
    assert contents(notes) == {"diary.txt": b"not a run"}
    valid = newest_first(full)
    assert valid and all((folder / "manifest.json").exists() for folder in valid)
    (start,) = tmp_path.glob("new/*/*/manifest.json")  # all that the one that diverged has left
    assert start.parent.name == "round-00000000"

    (shard,) = run.glob("checkpoints/*/rank-00001.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    job = mpirun(3, *TRAIN, *SHORT, "--out", run, "--resume", "auto")
    assert job.returncode == 2
    assert re.search(r"no checkpoint in .* is usable \(rank 1: ", job.stderr), job.stderr


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
