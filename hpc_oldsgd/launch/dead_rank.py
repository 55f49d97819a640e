"""Under srun the death of a rank ends the others at once.

srun cannot tell a rank that was killed from one that has ended a little before the others, so it
waits. A small process beside each rank can: the rank tells it of a normal end, whatever the exit
code. If the rank is gone without a word, this process ends the job step.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
from pathlib import Path

# Signals that srun passes on are for the rank.
WATCH = """trap "" INT TERM USR1; read -r _ || exec scancel --signal=KILL "$0" """

_pipes: list[int] = []


def watch() -> None:
    """Only where srun itself has started this process: mpirun ends its ranks by itself."""
    job, step = (os.environ.get(f"SLURM_{name}_ID") for name in ("JOB", "STEP"))
    if not (job and step) or _parent() != "slurmstepd" or not shutil.which("scancel"):
        return
    watched, held = os.pipe()
    subprocess.Popen(
        ["sh", "-c", WATCH, f"{job}.{step}"],
        stdin=watched, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(watched)
    _pipes.append(held)
    atexit.register(ended)


def ended() -> None:
    """This rank ends by itself, and what ends the others is not its death."""
    while _pipes:
        with contextlib.suppress(OSError):
            os.write(_pipes.pop(), b"ended\n")


def _parent() -> str:
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        return ""
