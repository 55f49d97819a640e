"""python -m benchmarks: a version of everything in under ten minutes; `make bench` calls it.

The full measurements of docs/benchmarks.md are the same commands with their own defaults.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hpc_oldsgd import cli

from .launch import ROOT, mpirun, slow_net_works

NO_ROOT = "needs a slow network of its own, so root (or user namespaces), iproute2 and sch_tbf"


@dataclass(frozen=True)
class Part:
    title: str
    words: tuple[str, ...]
    ranks: int = 0  # started under mpirun, if any
    slow_net: bool = False


PARTS = (
    Part("The mixing op against torch", ("hpc_oldsgd.bench", "mix", "--elements", "10000000",
         "--threads", "1", "--no-compile")),
    Part("A step through the Agent against a bare optimizer",
         ("hpc_oldsgd.bench", "overhead", "--pairs", "8"), ranks=2),
    Part("How much communication hides, on the network that is there",
         ("hpc_oldsgd.bench", "overlap", "--rounds", "4", "--grad-seconds", "0.1"), ranks=4),
    Part("Ours beside DDP and others, on a slow network",
         ("benchmarks.peers", "--network", "slow", "--rounds", "2", "--grad-seconds", "0.1",
          "--model-bytes", "20000000"), slow_net=True),
    Part("Seconds to accuracy, digits, on a slow network",
         ("benchmarks.accuracy", "--entry", "oldsgd-auto", "oldsgd", "ldsgd", "lsgd", "ddp",
          "--ratio", "2.5", "--repeats", "1", "--tau", "5", "--limit", "15", "--target", "0.9"),
         slow_net=True),
    Part("How cost grows, on a slow network", ("benchmarks.growth", "--quick", "--rounds", "2"),
         slow_net=True),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """All benchmarks, small: mixing op, overhead, overlap, peers, accuracy, growth."""

    output: Path | None = None
    """Folder for the JSON and the figures of the parts that write any."""


def main(options: Options) -> int:
    left_out, failed = [], []
    start = time.perf_counter()
    for part in PARTS:
        if part.slow_net and not slow_net_works():
            left_out.append(part.title)
            continue
        print(f"\n===== {part.title} =====\n", flush=True)
        words = list(part.words)
        if options.output is not None and words[0].startswith("benchmarks."):
            words += ["--output", str(options.output.absolute())]
        command = [mpirun(), "-n", str(part.ranks)] if part.ranks else []
        command += [sys.executable, "-m", *words]
        if subprocess.run(command, cwd=ROOT, env=environment(part.ranks)).returncode:
            failed.append(part.title)
    print(f"\n===== {time.perf_counter() - start:.0f} s =====")
    for title in left_out:
        print(f"Left out: {title}: {NO_ROOT}.")
    for title in failed:
        print(f"Failed: {title}.")
    return 1 if failed else 0


def environment(ranks: int) -> dict[str, str]:
    """One thread a rank while modules load; a program on its own keeps the machine's threads."""
    return {**os.environ, **({"OMP_NUM_THREADS": "1"} if ranks else {})}


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks")
