"""docs/adding-an-algorithm.md, followed to the letter: in another folder, outside the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

DOC = ROOT / "docs" / "adding-an-algorithm.md"
FILES = ("heavy_ball.py", "test_heavy_ball.py", "pyproject.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page: each is the code block that follows its name."""
    text = DOC.read_text()
    for name in FILES:
        match = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", text, re.DOTALL)
        assert match, f"{name} is not in {DOC.name}"
        (tmp_path / name).write_text(match[1])
    return tmp_path


def python(*args: object, cwd: Path, path: Path | None = None) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_decorator_and_the_tests_of_the_page(folder: Path) -> None:
    out = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_heavy_ball.py", cwd=folder)
    assert "4 passed" in out


def test_the_entry_point(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    offline = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    python("-m", "pip", "install", *offline, "--target", site, folder, cwd=elsewhere)
    chosen = ("--quick", "--tau", 5, "--c", 7, "--algorithm", "heavy_ball", "oldsgd")
    out = python("-m", "hpc_oldsgd.study", "table1", *chosen, cwd=elsewhere, path=site)
    assert re.search(r"\| heavy_ball +\| \? +\| \? / 7 +\|", out), out
    assert re.search(r"\| oldsgd +\| max\(tau, c\) +\| 7 / 7 +\|", out), out
