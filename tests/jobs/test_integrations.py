"""The examples with training frameworks, with the real packages, and what they call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_oldsgd import integrations
from hpc_oldsgd.launch import frameworks
from support.jobs import Mpirun

EXAMPLES = ("hf_trainer", "accelerate_loop", "lightning_trainer", "lightning_fabric")


@pytest.mark.slow
def test_the_examples_are_the_plain_loop_and_resume(mpirun: Mpirun, tmp_path: Path) -> None:
    """One job for all: see support/integrations.py."""
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed: make setup-dev")
    ran = mpirun(2, "-m", "support.integrations", tmp_path, timeout_s=250)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name in EXAMPLES:
        assert f"{name} is the plain loop" in ran.stdout


def test_accelerate_sees_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: start() starts MPI."""
    names = dict.fromkeys(integrations.HIDDEN, "1") | {"MPI_LOCALRANKID": "0"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    program = (
        "import os\nfrom hpc_oldsgd.integrations import HIDDEN, start\n"
        "print(start(), [k for k in HIDDEN if k in os.environ])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **names}, capture_output=True, text=True
    )
    assert ran.stdout == "(0, 1) []\n", ran.stderr


def test_a_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for local, visible, own in [("1", "4,7", "7"), ("2", "4,7", "4"), ("1", None, "1")]:
        monkeypatch.setenv("MPI_LOCALRANKID", local)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        integrations._show_own_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as Slurm gives them
    integrations._show_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_accelerate_without_start_is_one_line(mpirun: Mpirun, tmp_path: Path) -> None:
    """Its own message is a traceback of each rank, and asks for MASTER_ADDR."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: make setup-dev")
    script = tmp_path / "job.py"
    script.write_text(
        "from hpc_oldsgd import Agent\nfrom accelerate import Accelerator\nAccelerator(cpu=True)\n"
    )
    ran = mpirun(2, script, MASTER_ADDR="")
    assert ran.returncode != 0
    assert ran.stderr.count(f"hpc_oldsgd: {script}, line 3: Accelerate takes the variables of") == 1
    assert "integrations.start()" in ran.stderr
    assert "Traceback" not in ran.stderr and "MASTER_ADDR" not in ran.stderr, ran.stderr


def test_other_errors_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("environment variable MASTER_ADDR expected, but not set")
    monkeypatch.setitem(sys.modules, "accelerate", sys)
    monkeypatch.setattr(frameworks, "launcher_size", lambda: 2)
    assert "start()" in frameworks.explained(error, None)
    assert not frameworks.explained(ValueError("no data"), None)
    monkeypatch.setattr(frameworks, "launcher_size", lambda: 1)  # no mpirun
    assert not frameworks.explained(error, None)
    monkeypatch.setattr(frameworks, "launcher_size", lambda: 2)
    monkeypatch.delitem(sys.modules, "accelerate")  # a loop with torch.distributed of its own
    assert not frameworks.explained(error, None)
