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
from support.simulated_runs import SHORT, rows_of, simulated

HOLD = """
import sys, time
from pathlib import Path
from hpc_oldsgd.runs import claim
claim.claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to `tmp_path / "run"`."""
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    words = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
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
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    says = rf"another job writes to .*run \(process {holder.pid} on .*\): wait for its end, or"
    with pytest.raises(UserError, match=says):
        simulated(f"{SHORT} {how}", run)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_job_that_is_killed_holds_up_nobody(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGKILL)
    run = simulated(SHORT, tmp_path / "run")
    assert len(rows_of(run)) > 1
    simulated(f"{SHORT} --overwrite", run)  # and neither does one that is done
    assert run.resolve() not in claim._claimed


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
