"""Two jobs never write one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import claim
from hpc_oldsgd.runs.folder import folder_for
from hpc_oldsgd.training.options import SimulateOptions
from support import PYTHONPATH
from support.runs import SHORT, contents, rows_of, simulated

HOLD = """
import sys, time
from pathlib import Path
from hpc_oldsgd.runs import claim
claim.claim(Path(sys.argv[1]))
print("held", flush=True)
input()
from support.runs import SHORT, simulated
simulated(SHORT, Path(sys.argv[1]))
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to `tmp_path / "run"`: a whole run, after a line of input."""
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    words = [sys.executable, "-c", HOLD, str(run)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["", "--resume auto", "--overwrite"])
def test_a_run_that_another_job_writes_is_left_alone(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    run = simulated(SHORT, tmp_path / "run") if how else tmp_path / "run"
    holder = request.getfixturevalue("holder")
    monkeypatch.setattr(claim, "DYING_S", 0.2)
    before = contents(run)
    says = rf"another job writes to .*run \(process {holder.pid} on .*\): wait for its end, or"
    with pytest.raises(UserError, match=says):
        simulated(f"{SHORT} {how}", run)
    assert contents(run) == before


@pytest.mark.parametrize("how", ["", "--resume auto", "--overwrite"])
def test_a_run_that_was_written_while_this_job_waited_is_kept(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: subprocess.Popen[str]
) -> None:
    """The folder is new to both jobs when they look, and only one can have it."""
    run, may_write = tmp_path / "run", claim._try
    left: list[dict[str, bytes]] = []

    def other_job_first(handle: int) -> bool:
        if not left:
            assert not may_write(handle)
            holder.communicate("go on\n")
            assert holder.returncode == 0
            left.append(contents(run))
        return may_write(handle)

    monkeypatch.setattr(claim, "_try", other_job_first)
    with pytest.raises(UserError, match=r"another job has just written to .*: add --resume auto"):
        simulated(f"{SHORT} --seed 1 {how}", run)
    found = contents(run)
    for files in (*left, found):
        del files[claim.NAME]
    assert [found] == left and "summary.json" in found


def test_two_jobs_that_start_at_once_get_two_folders() -> None:
    """As the members of a job array do, which have the same time and another seed."""
    options = SimulateOptions(seed=3)
    names = [folder_for(options, 9).name for _ in range(2)]
    assert names[0] != names[1] and all(name.endswith("-seed3") for name in names)


def test_a_job_that_is_killed_holds_up_nobody(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGKILL)
    run = simulated(SHORT, tmp_path / "run")
    assert len(rows_of(run)) > 1
    simulated(f"{SHORT} --overwrite", run)  # and neither does one that is done


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / claim.NAME).symlink_to(victim)
    with pytest.raises(UserError, match="cannot write to"):
        simulated(SHORT, run)
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(0o500)
    with pytest.raises(UserError, match="cannot write to"):
        claim.claim(run)
