"""csrc/*.cu without a GPU: compiled for the host over a shim, and to PTX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from . import ROOT

NATIVE = ROOT / "tests" / "native"


def compile_with(*command: str | Path) -> str:
    ran = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def for_the_host(source: str, folder: Path) -> Path:
    """A library of tests/native/`source` as g++ compiles it over the shim."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    library = (folder / source).with_suffix(".so")
    compile_with(
        *("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"),
        *("-shared", "-fPIC", "-I", NATIVE / "cuda_shim", NATIVE / source, "-o", library),
    )
    return library


def to_ptx(source: str, folder: Path) -> Path:
    if not shutil.which("nvcc"):
        pytest.skip("there is no nvcc")
    path = (folder / source).with_suffix(".ptx")
    flags = ("-std=c++17", "-O3", "-fmad=false", "-arch=compute_75", "-ptx")
    compile_with("nvcc", *flags, ROOT / "csrc" / source, "-o", path)
    return path


def spills(ptx: Path, arch: str, folder: Path) -> list[tuple[str, str]]:
    """(bytes stored, bytes loaded) of every kernel, as ptxas reports them."""
    out = folder / "kernels.cubin"
    said = compile_with("nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", ptx, "-o", out)
    return re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)


def kernels(ptx: Path) -> list[str]:
    return re.split(r"\.visible \.entry|\.entry", ptx.read_text())[1:]


WIDE = r"\.global(?:\.\w+)*\.(?:v4\.[a-z]+32|v2\.[a-z]+64)"
"""128 bits, after "ld" or "st"."""
