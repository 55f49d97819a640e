"""Whole jobs under mpirun: a rank that fails ends all of them, and the example trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import sys, time
import torch
from mpi4py import MPI
from hpc_oldsgd import Agent, OLDSGD, UserError
from hpc_oldsgd.runtime.sgd import SGD  # starts in half the time of torch's
rank = MPI.COMM_WORLD.rank
model = torch.nn.Linear(3, 2)
agent = Agent(model, SGD(model.parameters(), lr=0.1), OLDSGD(tau=2), "ring")
def step():
    agent.optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    return agent.step()
"""


@pytest.fixture
def job(mpirun, tmp_path):
    def run(n: int, body: str, **options):
        script = tmp_path / "job.py"
        script.write_text(HEAD + textwrap.dedent(body))
        result = mpirun(n, script, timeout_s=240, **options)
        assert result.returncode != 124, "the job hangs"
        return result

    return run


def test_a_rank_that_fails_takes_the_job_down_with_its_traceback(job):
    """Rank 1 dies before its neighbours' messages are answered: they would wait for ever."""
    result = job(
        3,
        """
        for k in range(100):
            step()
            if rank == 1 and k == 4:
                raise RuntimeError("rank 1 lost its data")
        """,
    )
    assert result.returncode not in (0, None)
    assert "rank 1 failed, the job ends:" in result.stderr
    assert "RuntimeError: rank 1 lost its data" in result.stderr
    assert re.search(r'job\.py", line \d+, in <module>', result.stderr)
    assert result.stderr.count("Traceback") == 1


def test_a_killed_rank_takes_the_job_down(job):
    result = job(
        2,
        """
        import os, signal
        for k in range(10**9):
            if rank == 1 and k == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            step()
        """,
    )
    assert result.returncode != 0


def test_bad_input_on_one_rank_is_one_line_and_exit_2(job):
    result = job(
        2,
        """
        step()
        if rank == 1:
            raise UserError("the file of rank 1 is empty")
        while True:
            step()
        """,
    )
    assert result.returncode == 2
    assert "hpc_oldsgd: the file of rank 1 is empty" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_all_ranks_meet_is_said_once(mpirun, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(HEAD.replace('"ring")', '"rung")'))
    result = mpirun(3, script, timeout_s=240)
    assert result.returncode == 2
    assert result.stderr.count("There is no topology 'rung'") == 1, result.stderr


def test_a_late_rank_ends_the_job_with_its_name(mpirun, tmp_path):
    script = tmp_path / "job.py"
    body = """
    for k in range(4):
        if rank == 1 and k == 1:
            time.sleep(1000)
        step()
    agent.finish()
    """
    head = HEAD.replace('"ring")', '"ring", timeout_s=2)')
    script.write_text(head + textwrap.dedent(body))
    result = mpirun(2, script, timeout_s=240)
    assert result.returncode == 4
    assert re.search(r"rank 0 \(.+\) has waited \d+ s for rank 1 \(.+\) in round 1", result.stderr)


def test_a_loop_that_forgets_to_finish_ends_all_the_same(job):
    result = job(
        2,
        """
        for k in range(5):
            step()
        print("the end")
        """,
    )
    assert (result.returncode, result.stdout.count("the end")) == (0, 2), result.stderr


def test_the_example_trains(mpirun):
    result = mpirun(2, "examples/drop_in.py", "--steps", "60", "--tau", "3", timeout_s=240)
    assert result.returncode == 0, result.stderr
    accuracy = re.fullmatch(r"2 agents, 60 steps: test accuracy ([\d.]+)%.*\n", result.stdout)
    assert accuracy and float(accuracy[1]) > 70


@pytest.mark.slow
def test_the_long_example_goes_on_where_it_ended(mpirun, tmp_path):
    """Uneven data, the mean, a scheduler, dropout: equal in every digit to a run without an end."""

    def run(folder: str, *options: str) -> str:
        arguments = ("--epochs", "2", "--save-every", "10", "--checkpoint", tmp_path / folder)
        result = mpirun(2, "examples/your_own_loop.py", *arguments, *options, timeout_s=240)
        assert result.returncode == 0 and "different weights" not in result.stderr, result.stderr
        return result.stdout.splitlines()[-1] if result.stdout else ""

    whole = run("whole")
    assert whole.startswith("sum of the mean weights")
    assert not run("ended", "--end-at", "13")
    assert run("ended") == whole


@pytest.mark.parametrize(
    "said, code, shown",
    [('"no data"', 1, "exits, the job ends: no data"), ("7", 7, "exits, the job ends")],
)
def test_a_rank_that_leaves_by_sys_exit_takes_the_job_down(job, said, code, shown):
    result = job(
        2,
        f"""
        with agent:
            for k in range(10**9):
                if rank == 1 and k == 4:
                    sys.exit({said})
                step()
        """,
    )
    assert result.returncode == code
    assert f"rank 1 {shown}" in result.stderr and "Traceback" not in result.stderr


ALONE = {
    "called finish() after 4 steps": """
        for k in range(4 if rank == 1 else 100):
            step()
        agent.finish()
        """,
    "came to the end of its script after 4 steps": """
        for k in range(4 if rank == 1 else 100):
            step()
        """,
    "called stop() after 4 steps": """
        agent.on_round.append(lambda a: a.stop() if rank == 1 and a.r == 2 else None)
        for k in range(100):
            if not step():
                break
        agent.finish()
        """,
    "waits for all ranks in mean() after 4 steps": """
        for k in range(100):
            step()
            if k == 3 and rank == 1:
                agent.mean()
        agent.finish()
        """,
    "called finish() after 6 steps, while rank 0 waits in mean() after 6 steps": """
        for k in range(6):
            step()
        if rank == 0:
            agent.mean()
        agent.finish()
        """,
}


@pytest.mark.parametrize("said", ALONE)
def test_what_one_rank_does_alone_is_said_at_once(job, said):
    """The limit on waits is ten minutes, that on the job four: the notice comes before."""
    result = job(2, ALONE[said])
    assert result.returncode == 2
    assert f"hpc_oldsgd: rank 1 {said}" in result.stderr, result.stderr
    assert "all ranks must make the same calls" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_rank_ends_before_its_last_message_has_left(job):
    """On a busy machine the thread that sends it may get no turn; here it never does."""
    result = job(
        2,
        """
        for k in range(3):
            step()
        if rank == 1:
            from types import SimpleNamespace
            agent.transport.engine.submit = lambda *a: SimpleNamespace(done=False, exception=None)
        for k in range(1 if rank == 1 else 100):
            step()
        """,
    )
    assert result.returncode == 2
    said = "hpc_oldsgd: rank 1 came to the end of its script after 4 steps, while rank 0 trains on"
    assert said in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_notices_that_come_late_mean_nothing(job):
    """Rank 1 waits in mean() for a while, since rank 0 is slow: all is well, here and later."""
    result = job(
        3,
        """
        for k in range(12):
            step()
            if k in (3, 7):
                if rank == 0:
                    time.sleep(1.5)
                agent.mean()
                agent.mean_state_dict()
            if k == 9 and rank == 2:
                time.sleep(1.5)
        if rank == 1:
            time.sleep(1.5)
        agent.finish()
        print("the end")
        """,
    )
    assert (result.returncode, result.stdout.count("the end")) == (0, 3), result.stderr


def test_open_mpi_is_told_of_small_fragments_by_any_import():
    program = "import hpc_oldsgd, os; print(os.environ['OMPI_MCA_btl_tcp_rdma_pipeline_frag_size'])"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OMPI_")}
    shown = subprocess.run(
        [sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "65536"
