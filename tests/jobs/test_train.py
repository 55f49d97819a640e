"""Whole jobs under mpirun: killed and resumed, frozen, failing on one rank, started wrongly."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from hpc_oldsgd import algorithms, export
from hpc_oldsgd.checkpoints.store import newest_first
from support.faults import has_checkpoint
from support.jobs import OPENMPI, SOON_S, TRAIN, Mpirun, seconds_since_fault
from support.runs import rows_of, simulated

SHORT = ["--task", "logistic", "--iterations", "60", "--tau", "2", "--eval-every", "5"]
SHORT += ["--checkpoint-every", "2"]
IN_FRAGMENTS = ["--tau", "3", "--fragments", "3", "--partition", "label:0.7"]


def killed_and_resumed(mpirun: Mpirun, tmp_path: Path, runs: dict[str, list[str]]) -> None:
    """One job goes on with the run that the last one lost a rank in, and loses one in the next."""
    go_on: list[str] = []
    for k, (name, words) in enumerate(runs.items()):
        run = [*words, "--out", str(tmp_path / name)]
        killed = mpirun(3, *TRAIN, *go_on, *run, FAULT=f"kill:{(k + 1) % 3}:31")
        assert seconds_since_fault(tmp_path / name) < SOON_S
        assert killed.returncode != 0 and "failed" not in killed.stderr
        assert ("goes on from round" in killed.stderr) == bool(go_on)
        # Not each: the newest may be half written, the oldest half removed.
        assert has_checkpoint(tmp_path / name)
        go_on = [*run, "--resume", "auto", "--"]
    done = mpirun(3, *TRAIN, *go_on[:-1])
    assert done.returncode == 0 and "goes on from round" in done.stderr
    for name, words in runs.items():
        whole = simulated(" ".join([*words, "--agents 3"]), tmp_path / f"{name}-whole")
        expected, found = (export.newest(run, print) for run in (whole, tmp_path / name))
        assert found.r == expected.r
        X = expected.read(0)["runner"]["x"]
        for i in range(3):
            assert torch.equal(found.read(i)["runner"]["x"], X[i]), (name, i)
        rows, all_rows = rows_of(tmp_path / name), rows_of(whole)
        for column in ("round", "agent_loss"):
            assert [row[column] for row in rows] == [row[column] for row in all_rows], name
        times = [row["time"] for row in rows]
        assert times == sorted(times) and times[0] > 0


def test_killed_in_the_middle_and_resumed(mpirun: Mpirun, tmp_path: Path) -> None:
    """SIGKILL on a rank of its own; the resumed job ends with the bits of a run without a break."""
    runs = {
        "oldsgd": [*SHORT, "--momentum", "0.9"],
        "kgt": [*SHORT, "--algorithm", "kgt", "--optimizer", "adamw"],
        "xoldsgd": [*SHORT, *IN_FRAGMENTS, "--algorithm", "xoldsgd", "--warmup", "30"],
    }
    killed_and_resumed(mpirun, tmp_path, runs)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_algorithm_killed_in_the_middle_and_resumed(mpirun: Mpirun, tmp_path: Path) -> None:
    runs = {
        name: [*SHORT, "--algorithm", name, *(["--tau", "1"] if name.startswith("dsgd") else [])]
        for name in algorithms.names()
    }
    for name in ("oldsgd", "xoldsgd"):
        runs[f"{name}-in-fragments"] = [*SHORT, *IN_FRAGMENTS, "--algorithm", name]
    killed_and_resumed(mpirun, tmp_path, runs)


def test_a_signal_to_one_rank(mpirun: Mpirun, tmp_path: Path) -> None:
    job = mpirun(2, *TRAIN, *SHORT, "--out", tmp_path / "run", FAULT="usr1:1:21")
    assert job.returncode == 75
    assert "hpc_oldsgd.train: stopped by a signal after iteration 24 of 60" in job.stderr
    assert newest_first(tmp_path / "run")[0].name == "round-00000012"


@pytest.mark.parametrize(
    ("what", "error"), [("raise", "ZeroDivisionError"), ("exhaust", "can't allocate memory")]
)
def test_one_rank_raises(mpirun: Mpirun, tmp_path: Path, what: str, error: str) -> None:
    job = mpirun(2, *TRAIN, *SHORT, "--out", tmp_path / "run", FAULT=f"{what}:1:7")
    assert seconds_since_fault(tmp_path / "run") < SOON_S
    assert job.returncode == 1
    assert "rank 1 failed, the job ends:" in job.stderr
    assert job.stderr.count("Traceback") == 1 and error in job.stderr, job.stderr


def test_one_rank_freezes(mpirun: Mpirun, tmp_path: Path) -> None:
    words = [*SHORT, "--timeout", "8", "--out", str(tmp_path / "run")]
    job = mpirun(3, *TRAIN, *words, FAULT="freeze:1:21")
    assert job.returncode == 4
    late = r"hpc_oldsgd.train: rank [02] \(.+\) has waited \d+ s for rank 1 \(.+\) "
    assert re.search(late, job.stderr), job.stderr
    assert job.stderr.count("what every rank was doing:") == 1
    assert re.search(r"  rank 1 \(.+\): computing in round \d+ .*; silent for", job.stderr), (
        job.stderr
    )
    assert re.search(r"  rank [02] \(.+\): .*, waiting for rank 1", job.stderr)
    assert not re.search(r"\(for \d{4,} s\)", job.stderr)
    assert export.newest(tmp_path / "run", print).r >= 2


@pytest.mark.parametrize("trace", [[], ["--trace"]])
def test_one_rank_freezes_after_the_last_round(
    mpirun: Mpirun, tmp_path: Path, trace: list[str]
) -> None:
    """MPI_Finalize would wait for it for ever."""
    words = [*SHORT, "--timeout", "6", *trace, "--out", str(tmp_path / "run")]
    job = mpirun(2, *TRAIN, *words, FAULT="freeze-at-end:1:0")
    assert job.returncode == 4, job.stderr
    assert re.search(r"rank 0 has waited \d+ s for rank 1 to start or end", job.stderr)
    assert export.newest(tmp_path / "run", print).r == 30


def test_what_all_ranks_raise_is_said_once(mpirun: Mpirun, tmp_path: Path) -> None:
    job = mpirun(
        3, *TRAIN, *SHORT, "--out", tmp_path / "run", FAULT="raise:0:7 raise:1:7 raise:2:7"
    )
    assert seconds_since_fault(tmp_path / "run") < SOON_S and job.returncode == 1
    assert job.stderr.count("Traceback") == 1 and "rank 0 failed, the job ends:" in job.stderr


def test_two_mpis_mixed(mpirun: Mpirun, tmp_path: Path) -> None:
    """MPICH's mpirun and Open MPI's library: N worlds of one rank."""
    library = OPENMPI / "lib" / "libmpi.so.40"
    if not library.exists() or not (Path(sys.prefix) / "bin" / "mpirun").exists():
        pytest.skip("needs MPICH and Open MPI side by side")
    words = ["-m", "hpc_oldsgd.train", *SHORT, "--out", str(tmp_path / "run")]
    job = mpirun(2, *words, MPI4PY_LIBMPI=str(library))
    assert job.returncode == 2
    assert job.stderr.count("started 2 processes but MPI sees a world of 1") == 1
    assert not (tmp_path / "run").exists()
