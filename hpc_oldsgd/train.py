"""mpirun -n 9 python -m hpc_oldsgd.train"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

from . import cli
from .cli.console import Console
from .errors import NeighbourTimeout
from .launch import dead_rank, deadline
from .launch.launcher import launcher_rank, launcher_size
from .runs import spec
from .runs.check import check
from .runs.session import Session
from .runs.spec import Spec
from .training.options import TrainOptions
from .training.signals import Inbox

PROG = "hpc_oldsgd.train"
START_S = 60.0  # the least; importing torch takes ranks that share cores that long


def main(**hooks: Callable[..., None]) -> None:
    """`hooks` are those of Session."""
    try:
        with cli.guard(PROG):
            asked = spec.parse(TrainOptions, PROG)
            if asked.options.check:
                Console(PROG, shown=launcher_rank() == 0).print(f"{PROG}: {check(asked)}")
                return
            signals = Inbox(asked.options.on_signal, ends_with_parent=launcher_size() > 1)
            signals.install()
            if asked.options.on_failure == "end":
                dead_rank.watch()
            start_mpi(asked.options.timeout)
            run(asked, signals, **hooks)
    except SystemExit as ended:
        leave_if_shrunk(int(ended.code or 0))
        raise
    leave_if_shrunk(0)


def start_mpi(timeout_s: float) -> None:
    """No wait for a rank that never comes to MPI, nor at the end for one that never leaves it."""
    if launcher_size() == 1 or not timeout_s:
        return
    who, start_s = f"{PROG}: rank {launcher_rank()}", max(timeout_s, START_S)
    late = "a rank was not started, is stuck, or has ended; the job ends"
    with deadline.limit(start_s, f"{who} has waited {start_s:.0f} s for MPI to start: {late}\n"):
        from .transport.mpi import collectives
    end_s = max(timeout_s, collectives.START_LEAST_S)
    late = "a rank is stuck; the job ends. The run's files are complete"
    message = f"{who} has waited {end_s:.0f} s for all to leave MPI: {late}\n"
    atexit.unregister(deadline.arm)  # of a run before, in this process
    atexit.register(deadline.arm, end_s, message)


def run(asked: Spec[TrainOptions], signals: Inbox | None = None, **hooks: Any) -> None:
    from .runs.mpi_backend import Mpi, alone  # starts MPI: not for --help
    from .transport.mpi import world

    comm = world()
    console = Console(PROG, shown=comm.rank == 0)
    with alone(comm, PROG, NeighbourTimeout):
        backend = Mpi(asked.options, PROG, console.say)
        Session(asked, backend, console, signals=signals, **hooks).run()


def leave_if_shrunk(code: int) -> None:
    """After the death of a rank MPI cannot be finalized."""
    ulfm = sys.modules.get("hpc_oldsgd.transport.mpi.ulfm")
    if ulfm is not None and ulfm.survivors:
        from .runs.mpi_backend import alone

        with alone(ulfm.MPI.COMM_WORLD, PROG, NeighbourTimeout):
            ulfm.leave(code)


if __name__ == "__main__":
    main()
