"""A test module's results on another instruction set, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import ROOT


def digest_on(isa: str, test_file: str) -> str:
    """What `digest()` of this test file gives there; skips where the machine has no such set."""
    file = Path(test_file)
    code = f"import {file.stem} as t, hpc_oldsgd.ops as o; print(o.build_info()['isa'], t.digest())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "HPC_OLDSGD_ISA": isa,
            "PYTHONPATH": f"{file.parent}:{ROOT / 'tests'}:{ROOT}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    used, found = ran.stdout.split()
    if used != isa:
        pytest.skip(f"this machine has no {isa}")
    return found
