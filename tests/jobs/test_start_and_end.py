"""Ranks that never come to MPI, never leave it, or lose the launcher that watches them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_oldsgd import export
from support import PYTHONPATH, ROOT
from support.faults import has_checkpoint
from support.jobs import TRAIN, Mpirun, openmpi
from support.processes import children, wait_for

SHORT = ["--task", "logistic", "--tau", "2", "--eval-every", "5", "--checkpoint-every", "2"]
START = """
import sys
from hpc_oldsgd import train
from hpc_oldsgd.launch import deadline
deadline.START_S = 1.0
sys.argv[1:] = ["--timeout", "3", "--out", sys.argv[1]]
train.main()
"""
AGENT = """
import torch
from hpc_oldsgd import Agent
from hpc_oldsgd.launch import deadline
deadline.START_S = 1.0
model = torch.nn.Linear(3, 2)
Agent(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=3.0)
"""


@pytest.fixture(params=["first", "openmpi"])
def each_mpi(request: pytest.FixtureRequest, mpirun: Mpirun) -> Mpirun:
    return mpirun if request.param == "first" else openmpi()


@pytest.mark.parametrize("absent", ["pass", "import time; time.sleep(600)"])
def test_a_rank_that_never_comes_to_mpi(each_mpi: Mpirun, tmp_path: Path, absent: str) -> None:
    other = [":", "-n", "1", sys.executable, "-c", absent]
    job = each_mpi(2, "-c", START, tmp_path / "run", *other, timeout_s=150)
    assert job.returncode not in (0, 124), job.stderr
    says = r"hpc_oldsgd.train: rank \d has waited 3 s for MPI to start: a rank was not started"
    assert re.search(says, job.stderr), job.stderr


def test_an_agent_waits_for_mpi_no_longer_than_it_was_told(mpirun: Mpirun) -> None:
    other = [":", "-n", "1", sys.executable, "-c", "import time; time.sleep(600)"]
    job = mpirun(2, "-c", AGENT, *other, timeout_s=150)
    assert job.returncode not in (0, 124), job.stderr
    assert re.search(r"Agent: rank \d has waited 3 s for MPI to start", job.stderr), job.stderr


def test_a_rank_that_never_leaves_mpi(each_mpi: Mpirun, tmp_path: Path) -> None:
    words = [*SHORT, "--iterations", "20", "--timeout", "6", "--out", str(tmp_path / "run")]
    job = each_mpi(2, *TRAIN, *words, FAULT="freeze-after:1:0", timeout_s=150)
    assert job.returncode not in (0, 124), job.stderr
    says = r"hpc_oldsgd.train: rank 0 has waited 6 s for all to leave MPI: a rank is stuck"
    assert re.search(says, job.stderr), job.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    assert export.newest(tmp_path / "run", print).r == 10


def test_ranks_that_nobody_watches_stop(tmp_path: Path) -> None:
    """The process of the launcher that started them is killed: they save and end, as if told to."""
    command, run = Path(sys.prefix) / "bin" / "mpirun", tmp_path / "run"
    if not command.exists():
        pytest.skip("needs the MPICH wheel, whose ranks outlive its proxy")
    words = [*SHORT, "--iterations", "1000000", "--timeout", "200", "--out", str(run)]
    job = subprocess.Popen(
        [command, "-n", "2", sys.executable, "-m", "hpc_oldsgd.train", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    ranks: list[int] = []
    try:
        wait_for(lambda: has_checkpoint(run, after_start=True))
        (proxy,) = children(job.pid)
        ranks = children(proxy)
        assert len(ranks) == 2
        os.kill(proxy, signal.SIGKILL)
        before = export.newest(run, print).r
        wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    finally:
        for rank in ranks:
            if Path(f"/proc/{rank}").exists():
                os.kill(rank, signal.SIGKILL)
        job.kill()
        job.wait()
    kept = export.newest(run, print)
    assert kept.r > before and not (run / "summary.json").exists()
    # Nothing holds the folder any more, and what is there is whole.
    for part in range(2):
        kept.check(part)


WAITS = r"""
import os, sys, time
from hpc_oldsgd.launch import deadline
if os.fork() == 0:  # a rank
    os.setsid()
    with deadline.limit(float(sys.argv[1]), "has waited"):
        os.write(1, b"%d\n" % os.getpid())  # at once: print may write the number and its end apart
        time.sleep(600)
os.write(1, b"up\n")
sys.stdin.read()
"""


@pytest.mark.parametrize(("limit_s", "launcher_ends"), [("3", False), ("500", True)])
def test_a_rank_that_waits_for_mpi_ends_without_its_launcher(
    limit_s: str, launcher_ends: bool
) -> None:
    """Its launcher is killed, and with it the pipe that it writes to; or only the pipe is gone."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", WAITS, limit_s], env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None and launcher.stderr is not None
    said = {launcher.stdout.readline().strip() for _ in range(2)}
    (rank,) = (int(word) for word in said - {"up"})
    try:
        launcher.stderr.close()
        if launcher_ends:
            launcher.kill()
        wait_for(lambda: not _runs(rank))
    finally:
        if _runs(rank):
            os.kill(rank, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def _runs(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
