"""Runs of hpc_oldsgd.train in which one rank does something bad at some iteration.

    mpirun -n 3 python tests/misbehave.py kill 1 20 --task logistic ... [ -- nothing 0 0 ... ]

Several runs, separated by --, follow each other in the same processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpc_oldsgd import cli, console, train

WHAT = {
    "nothing": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": lambda: print(1 // 0),
}
real_step = console.Console.step


def run(what: str, rank: str, iteration: str, *args: str) -> None:
    out = Path(args[args.index("--out") + 1])
    done: list[int] = []

    def step(self: console.Console, t: int) -> None:
        real_step(self, t)
        if t < int(iteration) or cli.launcher_rank() != int(rank) or done:
            return
        # A killed run is to have something to go on from.
        if what != "kill" or any(out.glob("checkpoints/*/manifest.json")):
            done.append(t)
            WHAT[what]()

    console.Console.step = step  # type: ignore[method-assign]
    sys.argv[1:] = args
    train.main()


words = sys.argv[1:]
while words:
    end = words.index("--") if "--" in words else len(words)
    command, words = words[:end], words[end + 1 :]
    run(*command)
