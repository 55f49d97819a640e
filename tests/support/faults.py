"""The one place where tests make a run fail, stop or wait on purpose.

In the process of the test: simulated(words, out, on_step=...), see runs.py.

In a job, this file runs in place of `-m hpc_oldsgd.train`. FAULT names what ranks do, and after
which iteration: what:rank:iteration, several with spaces between them.

    FAULT="kill:1:20" mpirun -n 3 python -m support.faults --task logistic --out ...

Several command lines, separated by --, follow each other in the same processes, which start once.
After each but the last, rank 0 prints === and the exit codes of all ranks. The fault is the last
one's. "freeze-at-end:1:0" and "kill-at-end:1:0" wait until all has been computed,
"freeze-after:1:0" until the run is complete.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import torch

from hpc_oldsgd.checkpoints.writer import Checkpoints
from hpc_oldsgd.cli.console import Console
from hpc_oldsgd.launch.launcher import launcher_rank
from hpc_oldsgd.training.signals import Inbox

HELD_AT, HELD_S = 1000, 300.0  # the iteration, and the longest wait


class AskOnce(Inbox):
    """As if a signal had asked for something, at the k-th boundary of this rank."""

    def __init__(self, k: int, wish: str = "stop") -> None:
        super().__init__()
        self.left, self.wish = k, wish

    def take(self) -> set[str]:
        self.left -= 1
        return {self.wish} if self.left == 0 else set()


@contextmanager
def fast_disk() -> Iterator[None]:
    """Every checkpoint is saved at the round where it is due.

    A run never waits for its disk. What is due while an older one is still being written is saved
    a few rounds later, on a busy machine more than a few: too late for tests that stop a short run
    after its second checkpoint, or name a round. At the end nothing is being written any more, not
    even by a run that has failed.
    """
    cast_wishes = Checkpoints.cast_wishes
    seen: set[Checkpoints] = set()

    def written(checkpoints: Checkpoints) -> None:
        under_way = checkpoints._saving and checkpoints._saving.written
        wait([future for future in (under_way, checkpoints._commit_done) if future])

    def once_written(checkpoints: Checkpoints) -> None:
        seen.add(checkpoints)
        written(checkpoints)
        cast_wishes(checkpoints)

    Checkpoints.cast_wishes = once_written  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpoints.cast_wishes = cast_wishes  # type: ignore[method-assign]
        for checkpoints in seen:
            written(checkpoints)


def has_checkpoint(out: Path, after_start: bool = False) -> bool:
    return any(out.glob(f"checkpoints/*{'[1-9]*' * after_start}/manifest.json"))


def hold_for_a_signal() -> None:
    """A run of this process waits in its middle, or it might be over before a signal is sent.

    For jobs whose command line cannot be changed: the only place that patches a run's course.
    """
    step = Console.step
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # a signal may come before the wait

    def step_and_wait(console: Console, t: int) -> None:
        step(console, t)
        if t == HELD_AT:
            select.select([woken], [], [], HELD_S)

    Console.step = step_and_wait  # type: ignore[method-assign]


def freeze() -> None:
    time.sleep(1)  # the heartbeat is written from time to time: it is to know this round
    os.kill(os.getpid(), signal.SIGSTOP)


def exhaust() -> None:
    """No more memory, as under ulimit -v; where the kernel kills instead, see "kill"."""
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    torch.zeros(2**28)


def fill_disk(largest_bytes: int = 1000) -> None:
    """No file grows any more."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, hard))


def second_job() -> None:
    """Another job that would go on with this run; what it says is in RUN.second."""
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    words = ["-m", "hpc_oldsgd.simulate", "--task", "logistic", "--resume", "auto", "--out"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "PRTE"))}
    done = subprocess.run(
        [sys.executable, *words, str(out)], env=env, capture_output=True, text=True
    )
    with out.with_suffix(".second").open("a") as said:
        said.write(f"{done.returncode} {done.stderr}")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": freeze,
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": lambda: print(1 // 0),
    "exhaust": exhaust,
    "full-disk": fill_disk,
    "second-job": second_job,
}


def run_with(fault: str, words: list[str]) -> None:
    """A run of hpc_oldsgd.train that meets `fault`: what:iteration, or nothing."""
    what, _, when = fault.partition(":")
    at_end = what.endswith("-at-end")
    out = Path(words[words.index("--out") + 1])
    done: list[int] = []

    def strike(t: int) -> None:
        if not what or at_end or what.endswith("-after") or done or t < int(when):
            return
        # A killed run is to have more than its start to go on from.
        if what not in ("kill", "full-disk") or has_checkpoint(out, after_start=what == "kill"):
            done.append(t)
            out.with_suffix(".when").write_text(str(time.time()))
            FAULTS[what]()

    from hpc_oldsgd import train
    from hpc_oldsgd.transport.mpi import collectives

    sys.argv[1:] = words

    def end() -> None:
        if "-at-end:" in os.environ.get("FAULT", "") or "-after:" in os.environ.get("FAULT", ""):
            collectives.START_LEAST_S = 1.0  # the others wait for it as long as --timeout says
        if at_end:
            FAULTS[what.removesuffix("-at-end")]()

    train.main(on_step=strike, on_end=end)
    if what.endswith("-after"):
        FAULTS[what.removesuffix("-after")]()


def main() -> None:
    from hpc_oldsgd import tasks
    from hpc_oldsgd.transport.mpi import collectives, world
    from support.bad_input import TASKS

    for name, kind in TASKS.items():
        tasks.register(name)(kind)
    faults = {}
    for named in os.environ.get("FAULT", "").split():
        what, rank, when = named.split(":")
        faults[int(rank)] = f"{what}:{when}"
    words = sys.argv[1:]
    while "--" in words:
        one, words = words[: words.index("--")], words[words.index("--") + 1 :]
        code: object = 0
        try:
            run_with("", one)
        except SystemExit as stop:
            code = stop.code or 0
        codes = collectives.gather_text(world(), str(code))
        if launcher_rank() == 0:
            print("=== " + " ".join(codes), file=sys.stderr, flush=True)
    run_with(faults.get(launcher_rank(), ""), words)


if __name__ == "__main__":
    with fast_disk():
        main()
