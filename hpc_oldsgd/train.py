"""mpirun -n 9 python -m hpc_oldsgd.train"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import cli
from .cli.console import Console
from .errors import NeighbourTimeout
from .launch import dead_rank
from .launch.launcher import launcher_rank, launcher_size
from .runs import spec
from .runs.check import check
from .runs.mpi_start import start_mpi
from .runs.session import Session
from .runs.spec import Spec
from .training.options import TrainOptions
from .training.signals import Inbox

PROG = "hpc_oldsgd.train"


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
            start_mpi(PROG, asked.options.timeout, ". The run's files are complete")
            run(asked, signals, **hooks)
    except SystemExit as ended:
        leave_if_shrunk(int(ended.code or 0))
        raise
    leave_if_shrunk(0)


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
