"""setup.py and the Makefile on machines that are not this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mpi4py
import pytest

from support import ROOT

make = pytest.mark.skipif(not shutil.which("make"), reason="there is no make")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_old_tools_of_the_machine_are_passed_over(tmp_path: Path) -> None:
    """With pip --no-build-isolation, as make installs: PATH has the machine's programs alone.

    A second ninja would not read the log of the first, and compile everything again.
    """
    pytest.importorskip("cmake")
    pytest.importorskip("ninja")
    pytest.importorskip("pybind11")
    for name in ("setup.py", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("cmake", "ninja"):
        script(tmp_path / "bin" / name, "echo old >&2; exit 1")
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


def test_a_second_build_finds_the_same_headers(tmp_path: Path) -> None:
    """pip wheel has pybind11 in another folder each time: compiled files depend on none of them."""
    for name in ("setup.py", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    bin_dir = script(tmp_path / "bin" / "cmake", 'echo "$*" >>args').parent
    seen = []
    for k in (1, 2):
        made = tmp_path / f"isolated{k}"
        share = made / "pybind11" / "share" / "cmake" / "pybind11"
        share.mkdir(parents=True)
        (made / "pybind11" / "include").mkdir()
        (made / "pybind11" / "include" / "pybind11.h").write_text("// the same")
        (made / "pybind11" / "__init__.py").write_text(f"get_cmake_dir = lambda: {str(share)!r}")
        (made / "cmake.py").write_text(f"CMAKE_BIN_DIR = {str(bin_dir)!r}")
        subprocess.run(
            [sys.executable, "setup.py", "build_ext"], cwd=tmp_path, check=True,
            capture_output=True, env={**os.environ, "PYTHONPATH": str(made)},
        )  # fmt: skip
        (header,) = (tmp_path / "build").rglob("pybind11.h")
        seen.append((header, header.stat().st_mtime_ns))
    assert seen[0] == seen[1]
    said = (tmp_path / "args").read_text()
    assert said.count(f"-Dpybind11_DIR={seen[0][0].parents[1]}/share/cmake/pybind11") == 2
    assert "isolated" not in said


def run_make(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # those of make test
    return subprocess.run(
        ["make", "-C", str(ROOT), *words], env=env | more, capture_output=True, text=True
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
@pytest.mark.parametrize("has", ["wheel", "system", ""])
def test_an_mpicc_that_appears_takes_no_environment_apart(has: str, tmp_path: Path) -> None:
    stamps = tmp_path / "venv" / "stamps"
    stamps.mkdir(parents=True)
    for name in ("venv", "torch", *([f"mpi-{has}"] if has else [])):
        (stamps / name).touch()
    mpicc = script(tmp_path / "bin" / "mpicc", "exit 1")
    for name in ("mpi-wheel", "mpi-system"):  # later than what they depend on
        if (stamps / name).exists():
            os.utime(stamps / name, (2e9, 2e9))
    env = {"PATH": f"{mpicc.parent}:{os.environ['PATH']}", "MPI": "auto"}
    words = ("--dry-run", f"VENV={tmp_path / 'venv'}", "setup")
    said = run_make(*words, **env).stdout
    assert ("uninstall" in said) == (has == ""), said
    kept = f"/venv keeps the MPI from PyPI that it has; MPI=system changes to that of {mpicc}"
    assert (kept in said) == (has == "wheel"), said
    said = run_make(*words, "MPI=system", "-W", str(stamps / "torch"), **env).stdout
    assert f"use-system-mpi.sh {tmp_path}/venv/bin/python {mpicc}" in said


def test_mpi4pys_wheel_loads_the_systems_mpi(tmp_path: Path) -> None:
    """Here the Open MPI beside the first MPI stands for the machine's own."""
    mpicc = Path(sys.prefix) / "openmpi" / "bin" / "mpicc"
    if not mpicc.exists() or not shutil.which("cc"):
        pytest.skip("there is no second MPI, or no compiler")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    (site,) = (tmp_path / "v" / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(f"{Path(mpi4py.__file__).parents[1]}\n")
    use = [ROOT / "scripts" / "use-system-mpi.sh", tmp_path / "v" / "bin" / "python"]
    given = {k: v for k, v in os.environ.items() if not k.startswith("MPI4PY")}
    done = subprocess.run([*use, mpicc], env=given, capture_output=True, text=True)
    assert done.returncode == 0 and "Open MPI" in done.stdout, done.stderr
    words = [use[1], "-m", "mpi4py", "--mpi-lib-version"]  # and so does every process to come
    said = subprocess.run(words, env=given, capture_output=True, text=True)
    assert "Open MPI" in said.stdout, said.stderr
    (site / "system-mpi.pth").unlink()
    no_mpi = script(tmp_path / "bin" / "mpicc", 'exec cc -DMPI_Init=strlen "$@"')
    done = subprocess.run([*use, no_mpi], env=given, capture_output=True, text=True)
    assert done.returncode and "load no libmpi.so" in done.stderr
    assert not (site / "system-mpi.pth").exists()


@make
def test_an_old_python_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    old = script(tmp_path / "bin" / "python3.9", f"exec {sys.executable} -c '{code}' \"$2\"")
    ran = run_make(f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "MPI=wheel", "setup")
    assert ran.returncode != 0 and "python3.9 is too old" in ran.stderr
    assert not (tmp_path / "venv").exists()
