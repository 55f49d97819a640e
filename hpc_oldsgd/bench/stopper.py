"""Stops processes with SIGSTOP and lets them go on, at random, until its standard input ends.

    python stopper.py SEED EVERY_S LENGTH_S PID...

A program of its own, without the package: it must run while the process that started it is stopped.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys


def main(seed: str, every_s: str, length_s: str, *pids: str) -> None:
    draw = random.Random(int(seed))
    stops = 0
    try:
        while not ended(draw.expovariate(1 / float(every_s))):
            pid = int(draw.choice(pids))
            os.kill(pid, signal.SIGSTOP)
            stops += 1
            over = ended(min(draw.expovariate(1 / float(length_s)), 20 * float(length_s)))
            os.kill(pid, signal.SIGCONT)
            if over:
                break
    except ProcessLookupError:
        pass  # a rank has died, and the job with it
    print(stops)


def ended(seconds: float) -> bool:
    """Wait; True if standard input has ended."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
