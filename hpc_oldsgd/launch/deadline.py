"""A limit on MPI_Init and MPI_Finalize, which wait for all ranks and for ever.

They hold Python's interpreter lock, so no thread and no signal handler of this process would run.
A small process watches instead. It ends when this process does, and ends this process in time,
and at once if the launcher that started this process is gone. Ctrl-C reaches it too: it does not
end it, and a start that does not end soon after is ended by it.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator

from .launcher import launcher_rank, launcher_size

CTRL_C_S = 5.0  # for a rank that is still in MPI_Init after Ctrl-C
START_S = 60.0  # the least; importing torch takes ranks that share cores that long

WATCH = """
import contextlib, os, select, signal, sys, time
seconds, process, launcher, message, after_ctrl_c = sys.argv[1:]
until = time.monotonic() + float(seconds)
def interrupted(*_):
    global until, message
    if until > (soon := time.monotonic() + float(after_ctrl_c)):
        until, message = soon, "interrupted while it waited for MPI to start\\n"
signal.signal(signal.SIGINT, interrupted)
def launched():  # a process whose parent has ended belongs to another one
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[1] == launcher
while time.monotonic() < until and launched():
    if select.select([0], [], [], min(1.0, max(0.0, until - time.monotonic())))[0]:
        sys.exit()
with contextlib.suppress(OSError):  # nobody may be there to read it
    os.write(2, message.encode())
time.sleep(0.5)
os.kill(int(process), signal.SIGKILL)
"""


def arm(
    seconds: float, message: str, after_ctrl_c: float = math.inf
) -> tuple[subprocess.Popen[bytes], int]:
    """Say `message` and kill this process after so long, unless it has ended or closed the pipe.

    The pipe is a bare number: the interpreter closes files of its own before MPI_Finalize.
    """
    watched, held = os.pipe()
    numbers = [str(number) for number in (seconds, os.getpid(), os.getppid())]
    words = [sys.executable, "-I", "-S", "-c", WATCH, *numbers, message, str(after_ctrl_c)]
    process = subprocess.Popen(words, stdin=watched, stdout=subprocess.DEVNULL)
    os.close(watched)
    return process, held


@contextlib.contextmanager
def limit(seconds: float, message: str) -> Iterator[None]:
    watcher, held = arm(seconds, message, CTRL_C_S)
    try:
        yield
    finally:
        os.close(held)
        watcher.wait()


@contextlib.contextmanager
def limit_start(prog: str, timeout_s: float | None) -> Iterator[None]:
    """Around the first import of mpi4py.MPI, which calls MPI_Init."""
    if launcher_size() == 1 or not timeout_s or "mpi4py.MPI" in sys.modules:
        yield
        return
    seconds = max(timeout_s, START_S)
    waited = f"{prog}: rank {launcher_rank()} has waited {seconds:.0f} s for MPI to start"
    late = "a rank was not started, is stuck, or has ended; the job ends"
    with limit(seconds, f"{waited}: {late}\n"):
        yield
