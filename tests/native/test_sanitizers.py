"""The C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

Compiled without optimization, which takes longer than the running: the checks are in the code all
the same.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
OTHERS = [CSRC / f"{name}.cpp" for name in ("mix_cpu", "narrow_cpu", "parallel", "progress")]
OTHERS += [HERE / "sanitized.cpp", HERE / "sanitized_narrow.cpp"]
KERNELS = [CSRC / "kernels.cpp", CSRC / "narrow_kernels.cpp"]
FLAGS = ["-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread"]
FLAGS += ["-DOLDSGD_FEWER_DEGREES"]
# Calls in place of inlined checks: half the compile time.
ADDRESS = ["-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0"]
# Null is an address, too.
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize=null", "-fno-sanitize-recover=all"]
AVX2 = ["-DOLDSGD_X86", "-DOLDSGD_AVX2", "-mavx2", "-mf16c"]


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    return found or pytest.skip("there is no C++ compiler")


def build(folder: Path, units: list[list[str | Path]], link: list[str]) -> Path:
    """Each unit is a source file and its flags; all are compiled at once."""
    command, program = compiler(), folder / "sanitized"
    (folder / "empty.cpp").write_text("int main() {}")
    able = [command, *link, str(folder / "empty.cpp"), "-o", str(program)]
    if subprocess.run(able, capture_output=True).returncode:
        pytest.skip(f"{command} has no {' '.join(link)}")
    jobs = [
        subprocess.Popen(
            [command, *FLAGS, *map(str, flags), "-c", str(source), "-o", str(folder / f"{k}.o")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for k, (source, *flags) in enumerate(units)
    ]
    said = [job.communicate()[1] for job in jobs]
    assert not any(job.returncode for job in jobs), "\n".join(said)
    objects = [str(folder / f"{k}.o") for k in range(len(units))]
    subprocess.run([command, *FLAGS, *link, *objects, "-o", str(program)], check=True)
    return program


def run(program: Path) -> None:
    # A report ends the program with a code of its own; leaks are looked for at the end.
    environment = {**os.environ, "HPC_OLDSGD_ISA": "avx2"}
    ran = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-8000:]
    assert "all done" in ran.stdout and not ran.stderr


def test_address_and_undefined_behaviour(tmp_path: Path) -> None:
    checks = [*ADDRESS, *UNDEFINED]
    x86 = platform.machine() in ("x86_64", "AMD64")
    define = ["-DOLDSGD_X86"] if x86 else []
    # The same sources twice: once is enough for undefined behaviour, the slower of the two.
    units: list[list[str | Path]] = [[source, *checks] for source in KERNELS]
    units += [[source, *ADDRESS, *AVX2] for source in KERNELS] if x86 else []
    units += [[source, *checks, *define] for source in OTHERS]
    run(build(tmp_path, units, [*ADDRESS[:1], *UNDEFINED]))


def test_threads(tmp_path: Path) -> None:
    check = "-fsanitize=thread"
    units: list[list[str | Path]] = [[s, check] for s in (*KERNELS, *OTHERS)]
    run(build(tmp_path, units, [check]))
