"""The MPI job as a whole: how it starts, and how an error on one rank ends all of it."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from threading import Timer
from types import TracebackType
from typing import TypeVar

from mpi4py import MPI

from ...errors import NeighbourTimeout, UserError
from ...launch import dead_rank, frameworks
from .collectives import clock_offset, gather_text

T = TypeVar("T")
AFTER_RANK_0_S = 1.0  # an error that all ranks meet is printed by rank 0 alone
GRACE_S = 0.5  # mpirun drops what it has not read yet when a job aborts


def world() -> MPI.Comm:
    return MPI.COMM_WORLD


def vendor() -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


class Startup:
    """The steps before an agent exists; an error on one rank becomes everybody's error."""

    def __init__(self, comm: MPI.Comm, timeout_s: float | None = None) -> None:
        abort_on_error(comm)
        self.comm, self.timeout_s = comm, timeout_s
        # By host name: MPI's own "shared" split says 1 where shared memory is switched off.
        own = {f"{platform.node()}:{core}" for core in os.sched_getaffinity(0)}
        everybody = self.gather(" ".join(sorted(own)))
        self.sharing = sum(not own.isdisjoint(cores.split()) for cores in everybody)
        """Ranks that may run on this one's cores, itself among them; 1 where each is bound."""

    def check(self, step: Callable[[], T]) -> T:
        """Run a step on all ranks. Collective: raises on all if it raised a UserError on any."""
        result, problem = None, ""
        try:
            result = step()
        except UserError as error:
            problem = str(error)
        except OSError as error:  # a file that cannot be read, a disk that is full
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        problems = self.gather(problem)
        bad = [j for j, text in enumerate(problems) if text]
        if bad:
            where = "" if len(bad) == len(problems) or bad[0] == 0 else f"rank {bad[0]}: "
            raise UserError(where + problems[bad[0]])
        return result  # type: ignore[return-value]

    def clock_offset(self) -> float:
        return clock_offset(self.comm, timeout_s=self.timeout_s)

    def gather(self, text: str) -> list[str]:
        return gather_text(self.comm, text, self.timeout_s)


def abort_on_error(comm: MPI.Comm) -> None:
    """An exception that nobody catches on one rank ends the job; else the others would hang."""
    if comm.size == 1 or getattr(sys.excepthook, "aborts", False):
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if comm.rank and not isinstance(error, (NeighbourTimeout, KeyboardInterrupt)):
            time.sleep(AFTER_RANK_0_S)
        shown = f"rank {comm.rank} failed, the job ends:\n"
        if death := explained_by_death(error):
            shown = f"hpc_oldsgd: {death}\n"
        elif isinstance(error, UserError):
            shown += f"hpc_oldsgd: {error}\n"
        elif said := frameworks.explained(error, tb):
            shown += f"hpc_oldsgd: {said}\n"
        else:
            shown += "".join(traceback.format_exception(kind, error, tb))
        end_job(MPI.COMM_WORLD, shown, int(getattr(error, "exit_code", 1)))

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def explained_by_death(error: BaseException) -> str:
    """What to say of an error that another rank's death has caused; nothing of any other."""
    if not isinstance(error, MPI.Exception):
        return ""
    comm, gone = MPI.COMM_WORLD, []
    with contextlib.suppress(MPI.Exception, AttributeError, NotImplementedError):
        failed = comm.Get_failed()  # known to an MPI with ULFM only
        gone = list(MPI.Group.Translate_ranks(failed, list(range(failed.size)), comm.group))
    if not gone and error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
        return ""
    who = f"rank {', '.join(map(str, gone))}" if gone else "another rank"
    return f"rank {comm.rank} ends the job: {who} has died"


def end_job(comm: MPI.Comm, message: str, code: int) -> None:
    """Print why, then end every rank. Does not return."""
    _print_last(message)
    dead_rank.ended()
    comm.Abort(code)


@contextlib.contextmanager
def limit(timeout_s: float | None, to_do: str) -> Iterator[None]:
    """For calls without a time limit of their own: ends the job if a rank never joins them."""
    if timeout_s is None:
        yield
        return
    message = f"rank {MPI.COMM_WORLD.rank} has waited {timeout_s:.0f} s {to_do}\n"
    timer = Timer(timeout_s, end_job, (MPI.COMM_WORLD, message, 4))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_rank(message: str) -> None:
    """Print why, then kill this process: a normal exit would wait in MPI for the others."""
    _print_last(message)
    os.kill(os.getpid(), signal.SIGKILL)


def _print_last(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(message)  # in one piece, not mixed with other ranks' lines
    sys.stderr.flush()
    time.sleep(GRACE_S)
