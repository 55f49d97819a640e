"""Processes that a test looks at from outside."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def children(process: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def wait_for(what: Callable[[], object], limit_s: float = 240.0) -> None:
    """The limit is wide: a test must not fail because the machine is busy."""
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)
