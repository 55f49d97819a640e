"""The start of MPI in a command: with a limit on it, and one on its end."""

from __future__ import annotations

import atexit
from typing import Any

from ..launch import deadline, shared_memory
from ..launch.device import local_rank
from ..launch.launcher import launcher_rank, launcher_size

COMMANDS_S = 600.0  # of commands that have no --timeout


def start_mpi(prog: str, timeout_s: float = COMMANDS_S, told: str = "") -> Any:
    """MPI's world. No wait for a rank that never comes to MPI, nor for one that never leaves it.

    `told` is added to what is said of the latter.
    """
    if launcher_size() > 1 and local_rank() == 0:
        shared_memory.sweep()  # of jobs that were killed
    with deadline.limit_start(prog, timeout_s):
        from ..transport.mpi import world
    if launcher_size() > 1 and timeout_s:
        who = f"{prog}: rank {launcher_rank()}"
        atexit.unregister(_limit_end)  # of a run before, in this process
        atexit.register(_limit_end, who, timeout_s, told)
    return world()


def _limit_end(who: str, timeout_s: float, told: str) -> None:
    from ..transport.mpi import collectives

    end_s = max(timeout_s, collectives.START_LEAST_S)
    late = f"a rank is stuck; the job ends{told}"
    deadline.arm(end_s, f"{who} has waited {end_s:.0f} s for all to leave MPI: {late}\n")
