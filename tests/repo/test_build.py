"""setup.py and the Makefile on machines that are not this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

make = pytest.mark.skipif(not shutil.which("make"), reason="there is no make")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_old_cmake_of_the_machine_is_passed_over(tmp_path: Path) -> None:
    """With pip --no-build-isolation, as make installs: PATH has the machine's programs alone."""
    pytest.importorskip("cmake")
    pytest.importorskip("pybind11")
    for name in ("setup.py", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    script(tmp_path / "bin" / "cmake", "echo old >&2; exit 1")
    given = {k: v for k, v in os.environ.items() if not k.startswith("HPC_OLDSGD_")}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    ran = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=tmp_path,
        env={**given, "PATH": path, "CXX": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "old" not in ran.stderr.splitlines()
    assert "not able to compile" in ran.stderr, "the other one has looked for a compiler"
    assert "the native extension was not built (CMake failed" in ran.stderr


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # those of make test
    return subprocess.run(
        ["make", "-C", str(ROOT), *words], env=env, capture_output=True, text=True
    )


@make
def test_mpi4py_fits_the_mpi(tmp_path: Path) -> None:
    """Also where the same virtual environment has had another one before."""
    stamps = tmp_path / "stamps"
    stamps.mkdir()
    for name in ("venv", "torch"):
        (stamps / name).touch()
    words = ("--dry-run", f"VENV={tmp_path}", "setup")
    begins_anew = f" {stamps}/mpi-*\n"  # if it is stopped half-way
    said = run_make(*words, "MPI=wheel").stdout
    assert said.index(begins_anew) < said.index("--force-reinstall mpi4py")
    said = run_make(*words, "MPI=system").stdout
    assert said.index(begins_anew) < said.index("uninstall --quiet --yes mpich")
    assert said.index("uninstall --quiet --yes mpich") < said.index("--no-binary mpi4py")
    assert f"rm -rf {tmp_path}/openmpi" in said


@make
def test_an_old_python_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    old = script(tmp_path / "bin" / "python3.9", f"exec {sys.executable} -c '{code}' \"$2\"")
    ran = run_make(f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "MPI=wheel", "setup")
    assert ran.returncode != 0 and "python3.9 is too old" in ran.stderr
    assert not (tmp_path / "venv").exists()
