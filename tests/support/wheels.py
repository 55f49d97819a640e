"""Wheels built in a test, without the extension."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support import ROOT


def built(tree: Path, hook: str = "build_wheel") -> Path:
    """The wheel that pip makes of a tree for `pip install .` or `pip install -e .`.

    The tree has no CMakeLists.txt, so there is no extension, whatever the environment asks for.
    """
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    call = f"from setuptools import build_meta; build_meta.{hook}('.')"
    env = {k: v for k, v in os.environ.items() if not k.startswith("HPC_OLDSGD_")}
    subprocess.run([sys.executable, "-c", call], cwd=tree, env=env, check=True, capture_output=True)
    (wheel,) = tree.glob("*.whl")
    return wheel
