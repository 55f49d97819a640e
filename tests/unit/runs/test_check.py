"""train --check: what a start would refuse, without MPI and without writing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.runs.check import check
from hpc_oldsgd.training.options import TrainOptions
from support.runs import SHORT, contents, simulated

SMALL = "--task logistic --iterations 20 --check"


def asked(words: str) -> str:
    return check(spec.parse(TrainOptions, "train", words.split()))


def test_a_login_node_needs_no_mpi(tmp_path: Path) -> None:
    """And no bad line costs more than one process."""
    code = "import sys, runpy; sys.modules['mpi4py'] = None; sys.argv[0] = 'train'\n"
    code += "runpy.run_module('hpc_oldsgd.train', run_name='__main__')"
    words = (*SMALL.split(), "--check-agents", "2", "4", "--out", str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hpc_oldsgd.train: good: logistic with ")
    assert done.stdout.endswith("oldsgd, ring, agents: 2, 4\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--task cifar10-vgg11 --data-dir none", "none"),
        ("--topology torus:2x3 --check-agents 6 8", "torus"),
        ("--check-agents 2 100000", "agents"),
        ("--slow 7:2 --check-agents 4", "7"),
        ("--algorithm ldsgd --tau auto --check-agents 4", "tau"),
        ("--resume none", "there is no such folder"),
    ],
)
def test_what_a_start_would_refuse(words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    size = "" if "--check-agents" in words else " --check-agents 2"
    with pytest.raises(UserError, match=says):
        asked(f"{SMALL} {words}{size}")


def test_the_folder_is_looked_at_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        asked(f"{SMALL} --check-agents 3 --out {tmp_path}/file/run")
    run = simulated(SHORT, tmp_path / "run")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds a run"):
        asked(f"{SMALL} --check-agents 3 --out {run}")
    with pytest.raises(UserError, match="this is another run than the checkpoint's"):
        asked(f"{SMALL} --check-agents 3 --resume auto --out {run}")  # of simulate
    assert contents(tmp_path) == before


def test_the_number_of_agents_comes_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "6")
    assert asked(f"{SMALL} --topology torus:2x3").endswith("agents: 6")
    monkeypatch.delenv("SLURM_NTASKS")
    assert "--check-agents N checks the graph too" in asked(f"{SMALL} --topology torus:2x3")
    with pytest.raises(UserError, match="--check-agents belongs to --check"):
        spec.parse(TrainOptions, "train", ["--check-agents", "2"])
