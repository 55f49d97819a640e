"""The wheel, installed where nothing is: `train` runs from it, alone and under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from support import ROOT

TAG = f"-cp{sys.version_info.major}{sys.version_info.minor}-"


def run(*words: object, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """No variable of ours and no PYTHONPATH: what the user of another machine has."""
    left_out = ("PYTHON", "HPC_OLDSGD_", "PIP_CONSTRAINT", "MPI4PY_")
    given = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=given | dict(env or {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def made(folder: Path) -> Path:
    """A wheel of this tree; what make has compiled is not compiled again."""
    run(
        *(sys.executable, "setup.py", "--quiet", "build", "--build-base", folder / "build"),
        *("bdist_wheel", "--bdist-dir", folder / "bdist", "--dist-dir", folder),
        cwd=ROOT,
        env={"HPC_OLDSGD_CUDA": "0", "HPC_OLDSGD_REQUIRE_NATIVE": "1"},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def train(folder: Path, mpirun: Path, env: Mapping[str, str]) -> None:
    python = folder / "v" / "bin" / "python"
    for n, launch in (1, ()), (2, (mpirun, "-n", 2)):
        out = folder / f"run-{n}"
        words = ("-m", "hpc_oldsgd.train", "--task", "logistic", "--iterations", 10, "--out", out)
        run(*launch, python, *words, cwd=folder, env=env)
        config = json.loads((out / "config.json").read_text())
        assert config["agents"] == n
        assert config["transport"]["native"], "the extension was not loaded"
        assert json.loads((out / "summary.json").read_text())["iteration"] == 10
    where = run(python, "-c", "import hpc_oldsgd; print(hpc_oldsgd.__file__)", cwd=folder, env=env)
    assert Path(where.strip()).is_relative_to(folder / "v")


def test_a_wheel_beside_a_torch_that_is_there(tmp_path: Path) -> None:
    """pip finds everything that the wheel requires in this environment, and installs it alone."""
    libmpi = next((Path(sys.prefix) / "lib").glob("libmpi.so.*"), None)
    if libmpi is None:
        pytest.skip("the MPI of this environment is not that of the extra [mpi]")
    wheel = made(tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", "v", cwd=tmp_path)
    (site,) = (tmp_path / "v" / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", "v/bin/python", "install", "--no-index")
    run(*pip, "--quiet", f"{wheel}[mpi]", cwd=tmp_path)
    train(tmp_path, Path(sys.prefix) / "bin" / "mpirun", {"MPI4PY_LIBMPI": str(libmpi)})


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_wheel_of_dist_in_an_empty_environment(tmp_path: Path) -> None:
    """`make test-wheel`: pip brings torch, mpi4py and an MPI too."""
    (wheel,) = (ROOT / "dist").glob(f"*{TAG}*manylinux*.whl")
    run(sys.executable, "-m", "venv", "v", cwd=tmp_path)
    run("v/bin/pip", "install", "--quiet", f"{wheel}[mpi]", cwd=tmp_path)
    train(tmp_path, tmp_path / "v" / "bin" / "mpirun", {})
