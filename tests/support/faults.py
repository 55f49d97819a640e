"""Runs of hpc_oldsgd.train in which one rank does something bad at some iteration.

    mpirun -n 3 python tests/misbehave.py kill 1 20 --task logistic ... [ -- nothing 0 0 ... ]

Several runs, separated by --, follow each other in the same processes. "kill 1,3 20,40" kills
rank 1 at iteration 20 and rank 3 at iteration 40, "kill,term 1,3 20,40" sends the second SIGTERM.
"freeze-at-end 1 0" stops rank 1 when all has been computed, and limits the wait for it to
--timeout; "kill-at-end" kills it then.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from hpc_oldsgd import cli, train
from hpc_oldsgd.cli import console
from hpc_oldsgd.transport.mpi import requests
from support import fast_disk


def freeze() -> None:
    time.sleep(1)  # the board of status is written from time to time: it is to know this round
    os.kill(os.getpid(), signal.SIGSTOP)


def exhaust() -> None:
    """No more memory, as under ulimit -v; where the kernel kills instead, see "kill"."""
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    torch.zeros(2**28)


WHAT = {
    "nothing": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": freeze,
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": lambda: print(1 // 0),
    "exhaust": exhaust,
}
real_step, real_close = console.Console.step, console.Console.close


def run(what: str, rank: str, iteration: str, *args: str) -> None:
    out = Path(args[args.index("--out") + 1])
    done: list[int] = []

    ranks = list(map(int, rank.split(",")))
    when = dict(zip(ranks, map(int, iteration.split(",")), strict=True))
    if "," in what:
        what = dict(zip(ranks, what.split(","), strict=True)).get(cli.launcher_rank(), "nothing")

    def step(self: console.Console, t: int) -> None:
        real_step(self, t)
        if t < when.get(cli.launcher_rank(), t + 1) or done:
            return
        # A killed run is to have more than its start to go on from.
        if what != "kill" or any(out.glob("checkpoints/*[1-9]*/manifest.json")):
            done.append(t)
            out.with_suffix(".when").write_text(str(time.time()))
            WHAT[what]()

    def close(self: console.Console) -> None:
        real_close(self)
        if cli.launcher_rank() in when:
            WHAT[what.removesuffix("-at-end")]()

    if what.endswith("-at-end"):
        requests.START_LEAST_S = 1.0
        console.Console.close = close  # type: ignore[method-assign]
    else:
        console.Console.step = step  # type: ignore[method-assign]
    sys.argv[1:] = args
    train.main()


fast_disk.make_prompt()
words = sys.argv[1:]
while words:
    end = words.index("--") if "--" in words else len(words)
    command, words = words[:end], words[end + 1 :]
    run(*command)
