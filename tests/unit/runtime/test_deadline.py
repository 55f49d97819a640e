"""The watcher of MPI's start and end: Ctrl-C does not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# A rank in MPI_Init: none of its signal handlers runs. It tells when its watcher listens.
STUCK = """
import signal, sys, time
from hpc_oldsgd.launch import deadline
signal.signal(signal.SIGINT, signal.SIG_IGN)
watcher, held = deadline.arm(60.0, "late", float(sys.argv[1]))
time.sleep(1.0)
print(watcher.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("after_s", "lives_s", "code"), [(0.5, 30, -signal.SIGKILL), (60, 2, 0)])
def test_ctrl_c_ends_a_rank_that_is_stuck(after_s: float, lives_s: float, code: int) -> None:
    words = [sys.executable, "-c", STUCK, str(after_s), str(lives_s)]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    os.kill(int(rank.stdout.readline()), signal.SIGINT)
    _, said = rank.communicate(timeout=25)
    assert rank.returncode == code and "Traceback" not in said
    assert ("interrupted while it waited for MPI" in said) == (code != 0)
