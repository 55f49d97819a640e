"""A job under mpirun, and its processes, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MARK = "HPC_OLDSGD_CHAOS"
POLL_S = 2e-3
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
_numbers = itertools.count()
_running: set[Job] = set()
_stopped = threading.Event()


def check_not_stopped() -> None:
    if _stopped.is_set():
        raise KeyboardInterrupt


def stop_all() -> None:
    """No job runs any more, and none starts."""
    _stopped.set()
    for job in list(_running):
        job.kill()


def waited(
    what: Callable[[], object],
    limit_s: float,
    poll_s: float = POLL_S,
    sign: Callable[[], object] = lambda: None,
) -> bool:
    """Whether it came true. A pause of this process itself counts for a second at most.

    Whenever the `sign` of life is another one, the time starts again.
    """
    left, seen = limit_s, sign()
    while not what():
        start = time.monotonic()
        time.sleep(poll_s)
        if (now := sign()) != seen:
            left, seen = limit_s, now
        left -= min(time.monotonic() - start, 1.0)
        if left < 0:
            return bool(what())
    return True


class Job:
    """`programs` are the words for python of each group of ranks, and how many ranks it has."""

    def __init__(
        self, mpirun: str, programs: Sequence[tuple[int, Sequence[str]]], said: Path
    ) -> None:
        check_not_stopped()
        self.mark = f"{os.getpid()}.{next(_numbers)}"
        self.said = said
        groups = [["-n", str(n), sys.executable, *words] for n, words in programs]
        words = groups[0] + [word for group in groups[1:] for word in (":", *group)]
        with said.open("wb") as log:
            self.launcher = subprocess.Popen(
                [*shlex.split(mpirun), *words],
                env={"OMP_NUM_THREADS": "1", **os.environ, MARK: self.mark},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,  # what it does to its process group is not done to us
            )  # fmt: skip
        _running.add(self)

    @property
    def text(self) -> str:
        return self.said.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self.launcher.poll()

    def processes(self) -> dict[int, dict[str, str]]:
        """The environment of each process that this job has started, the launcher's own not."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == self.launcher.pid:
                continue
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(word.partition("=")[::2] for word in words)
                if environment.get(MARK) == self.mark:
                    found[int(entry.name)] = environment
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> process of those that run `train` now."""
        found: dict[int, int] = {}
        for pid, environment in self.processes().items():
            rank = next((environment[name] for name in RANK if name in environment), None)
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if rank is not None and b"hpc_oldsgd.train" in words:
                    found[int(rank)] = pid
        return found

    def proxy(self) -> int | None:
        """The process of MPICH's launcher that has started the ranks."""
        for pid in self.processes():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == self.launcher.pid and pid not in self.ranks().values():
                    return pid
        return None

    def ended(self, limit_s: float, run: Path) -> bool:
        """Wait for the launcher and for every process of the job; kill what is left.

        The limit is on the time in which neither the job says nor the run writes anything: on a
        busy machine a job may take long.
        """

        def sign() -> object:
            files = (self.said, run / "metrics.jsonl", run / "checkpoints")
            return [file.stat().st_mtime_ns for file in files if file.exists()]

        in_time = waited(lambda: self.code is not None, limit_s, 0.05, sign)
        in_time = in_time and waited(lambda: not self.processes(), limit_s, 0.2, sign)
        self.kill()
        return in_time

    def kill(self) -> None:
        """End everything, whatever state it is in."""
        _running.discard(self)
        if self.code is None:
            self.launcher.kill()
            self.launcher.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
