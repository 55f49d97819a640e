"""A limit on MPI_Init and MPI_Finalize, which wait for all ranks and for ever.

They hold Python's interpreter lock, so no thread and no signal handler of this process would run.
A small process watches instead. It ends when this process does, and ends this process in time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

WATCH = """
import os, select, signal, sys, time
seconds, process, message = sys.argv[1:]
if not select.select([0], [], [], float(seconds))[0]:
    os.write(2, message.encode())
    time.sleep(0.5)
    os.kill(int(process), signal.SIGKILL)
"""


def arm(seconds: float, message: str) -> tuple[subprocess.Popen[bytes], int]:
    """Say `message` and kill this process after so long, unless it has ended or closed the pipe.

    The pipe is a bare number: the interpreter closes files of its own before MPI_Finalize.
    """
    watched, held = os.pipe()
    words = [sys.executable, "-I", "-S", "-c", WATCH, str(seconds), str(os.getpid()), message]
    process = subprocess.Popen(words, stdin=watched, stdout=subprocess.DEVNULL)
    os.close(watched)
    return process, held


@contextlib.contextmanager
def limit(seconds: float, message: str) -> Iterator[None]:
    watcher, held = arm(seconds, message)
    try:
        yield
    finally:
        os.close(held)
        watcher.wait()
