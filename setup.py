"""Builds hpc_oldsgd._native with CMake. Without a compiler the package installs all the same.

HPC_OLDSGD_CUDA=0|1            CUDA off or on; by default on where nvcc is found
HPC_OLDSGD_CUDA_ARCHS="80;90"  the architectures; the last one also as PTX for newer ones. By
                               default those of 70, 75, 80, 86 and 90 that nvcc knows
HPC_OLDSGD_REQUIRE_NATIVE=1    a failed build is an error
"""

import contextlib
import fcntl
import filecmp
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def tool(name: str) -> str:
    """From the package of that name: new enough, which the machine's own may not be, and the same
    with build isolation and without, so that one build goes on where the other ended. Else from
    PATH, or beside the interpreter of a virtual environment that is not activated."""
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    with contextlib.suppress(ImportError, AttributeError):
        where = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[name]
        folders.insert(0, getattr(importlib.import_module(name), where))
    return shutil.which(name, path=os.pathsep.join(folders)) or ""


def pybind11_cmake(build: Path) -> Path:
    """The CMake files of a copy of pybind11 that stays. With build isolation pip installs it anew
    each time, in another place, and every file would be compiled again."""
    import pybind11

    cmake, package = Path(pybind11.get_cmake_dir()), Path(pybind11.__file__).parent
    if not cmake.is_relative_to(package):
        return cmake  # the system's own, which stays
    for file in [*(package / "include").rglob("*"), *(package / "share").rglob("*")]:
        kept = build / "pybind11" / file.relative_to(package)
        if file.is_file() and not (kept.exists() and filecmp.cmp(file, kept, shallow=False)):
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, kept)
    return build / "pybind11" / cmake.relative_to(package)


def say(message: str) -> None:
    print(f"hpc_oldsgd: {message}", file=sys.stderr)


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cuda = {"0": "OFF", "1": "ON"}.get(os.environ.get("HPC_OLDSGD_CUDA", ""), "AUTO")
        required = cuda == "ON" or os.environ.get("HPC_OLDSGD_REQUIRE_NATIVE") == "1"
        try:
            try:
                self.cmake(ext, cuda)
            except subprocess.CalledProcessError:
                if cuda != "AUTO":
                    raise
                self.cmake(ext, "OFF")  # an nvcc that does not work must not cost the CPU code
                say("nvcc did not work, so the extension was built without CUDA.")
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            if required:
                raise
            failed = isinstance(error, subprocess.CalledProcessError)
            why = "CMake failed, see above" if failed else error
            say(
                f"the native extension was not built ({why}). The package works without it, "
                "mixing with plain torch; for full speed install a C++17 compiler and reinstall."
            )

    def cmake(self, ext: Extension, cuda: str) -> None:
        cmake = tool("cmake")
        if not cmake:
            raise FileNotFoundError("cmake not found")
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # Not build_temp, which pip makes anew each time: a second build compiles only what changed.
        root = Path(__file__).resolve().parent
        build = root / "build" / f"cmake-{sys.implementation.cache_tag}-{get_platform()}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            *(cmake, "-S", str(root), "-B", str(build)),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DOLDSGD_CUDA={cuda}",
        ]
        if ninja := tool("ninja"):
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        if archs := os.environ.get("HPC_OLDSGD_CUDA_ARCHS"):
            configure.append(f"-DOLDSGD_CUDA_ARCHS={archs}")
        with (build / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at once would spoil each other's objects
            # The cache names tools of the last build, which pip may have removed with it.
            (build / "CMakeCache.txt").unlink(missing_ok=True)
            configure.append(f"-Dpybind11_DIR={pybind11_cmake(build)}")
            subprocess.run(configure, check=True)
            subprocess.run([cmake, "--build", str(build), "--parallel"], check=True)


setup(
    ext_modules=[Extension("hpc_oldsgd._native", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
