"""One rank of the cells of one link and repeat, or of the measurement of a gradient."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpc_oldsgd import cli, topology
from hpc_oldsgd.transport.mpi import MpiTransport, world

from ..peers.entries import Entry, alone
from ..peers.worker import join_gloo
from .contestants import CONTESTANTS, Started, needs_tau, start
from .options import Options, from_json
from .report import reached
from .store import Run, Store, limit_of
from .task_load import Copy, TaskLoad, measure

WARM_UP, GRADIENTS = 5, 100  # before the clock starts, and under it
FIRST = 20  # steps before the first pause, which tells how long a step takes
PILOT_SEED = 1000


@dataclass(frozen=True)
class WorkerOptions:
    """Started by benchmarks.accuracy."""

    scratch: Path
    """Folder with asked.json, for the copies of the models."""
    folder: Path
    """Folder of the results."""
    ratio: float = 0.0
    """Of the link; 0 measures a gradient."""
    repeat: int = 0
    """Also the seed."""
    until: float = math.inf
    """Time after which nothing new starts."""


class Rank:
    """What all contestants share: the ranks, the load, the clock."""

    def __init__(self, given: WorkerOptions) -> None:
        self.given = given
        self.options = from_json((given.scratch / "asked.json").read_text())
        self.comm = world()
        torch.set_num_threads(1)
        self.idle = MpiTransport(self.comm, topology.from_name("ring", self.comm.size))
        join_gloo(self.idle)
        self.load = TaskLoad(self.options, self.comm.rank)
        self.store = Store(given.folder, self.options.identity(), self.options.primary[1])

    def close(self) -> None:
        self.idle.close()
        dist.destroy_process_group()

    def agreed(self, value: Any) -> Any:
        """What rank 0 gave, on all ranks: it alone reads and writes results."""
        return json.loads(self.idle.gather_text(json.dumps(value) if not self.comm.rank else "")[0])

    def say(self, text: str) -> None:
        if self.comm.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def gradient_seconds(self) -> float:
        """Of a step while all ranks compute and nothing is sent, on the slowest rank.

        The mean: where ranks share cores, most steps have a core for themselves and some wait for
        another rank's to end, and the median would jump between the two.
        """
        self.load.fresh()
        turns = alone(self.load, 1)
        for _ in range(WARM_UP):
            next(turns)
        self.idle.barrier()
        begin = time.perf_counter()
        for _ in range(GRADIENTS):
            next(turns)
        took = (time.perf_counter() - begin) / GRADIENTS
        return float(self.idle.reduce(np.array([took]), "max").result()[0])

    # -- the cells ---------------------------------------------------------------------------------

    def cells(self) -> int:
        """Those that are not there yet; how many were measured. Collective."""
        o, ratio, repeat, count = self.options, self.given.ratio, self.given.repeat, 0
        for name in o.entry:
            entry = CONTESTANTS[name]
            if reason := entry.reason_to_skip(self.comm.size):
                self.say(f"{name}: left out, {reason}")
                continue
            first = o.entry[0]
            limit = limit_of(self.store, first, name, ratio, repeat, o.limit, o.give_up)
            late = time.time() > self.given.until
            done = self.store.finished(name, ratio, repeat, limit)
            limit, late, done = self.agreed([limit, late, done])
            if done:
                continue
            if late:
                break
            tau = self.tau_for(entry)
            self.load.reseed(repeat)
            run = self.train(entry, tau, limit, o.target)
            run |= {"ratio": ratio, "repeat": repeat}
            if self.comm.rank == 0:
                self.store.write_run(run)
            self.say(told(run, o))
            self.idle.barrier()
            count += 1
        return count

    def tau_for(self, entry: Entry) -> int:
        """From a large tau downwards, for as long as the pilot runs get better. Collective."""
        o, ratio = self.options, self.given.ratio
        if not needs_tau(entry) or len(o.tau) == 1:
            return o.tau[0]
        kept = self.agreed(self.store.pilot(entry.name, ratio))
        if kept is not None:
            return int(kept["tau"])
        best, tried = None, {}
        sign = 1 if o.primary[1] else -1
        self.load.reseed(PILOT_SEED)
        for tau in sorted(o.tau, reverse=True):
            run = self.train(entry, tau, o.pilot, None)
            tried[tau] = run["value"][-1], run["iteration"][-1]
            if best is not None and sign * tried[tau][0] < sign * tried[best][0]:
                break
            best = tau
        if self.comm.rank == 0:
            self.store.write_pilot(entry.name, ratio, {"tau": best, "tried": tried})
        values = ", ".join(f"tau {tau} {value:.3g}" for tau, (value, _) in tried.items())
        self.say(f"{entry.name}, message {ratio:g}, pilot of {o.pilot:g} s: {values}")
        assert best is not None
        return best

    def train(self, entry: Entry, tau: int, limit: float, target: float | None) -> Run:
        """To the target or the limit. Collective."""
        o = self.options
        self.load.fresh()
        started = start(entry, self.load, tau)
        run: Run = {"entry": entry.name, "limit": limit, "iteration": [], "time": [], "value": []}
        run |= {"tau": started.tau, "said": started.said, "before_s": started.before_s}
        every = o.every if target is not None else 10**9
        for points in segments(started, self.load, self.idle, every, o.pause, limit):
            for name, values in zip(("iteration", "time", "value"),
                                    measure(points, self.load, self.idle, self.given.scratch),
                                    strict=True):  # fmt: skip
                run[name] += values
            if target is not None and reached(run, target, o.primary[1]) is not None:
                break
            if not math.isfinite(run["value"][-1]):
                break
        started.steps.close()  # type: ignore[attr-defined]
        return run


def segments(
    started: Started, load: TaskLoad, idle: Any, every: int, pause: float, limit: float
) -> Any:
    """The copies of one stretch of training after the other; the clock stands while they are used.

    All ranks know beforehand how many steps a stretch has, so nothing is agreed while the clock
    runs. A message that is on its way when the clock stops arrives for nothing: one a pause.
    """
    tau = started.tau
    every = max(1, round(every / tau)) * tau
    t, now, segment = 0, 0.0, tau * math.ceil(FIRST / tau)
    copies: list[Copy] = [(0, 0.0, load.flat())]
    while True:
        begin = idle.barrier() - now
        for _ in range(segment):
            next(started.steps)
            t += 1
            if t % every == 0:
                copies.append((t, time.perf_counter() - begin, load.flat()))
        own = time.perf_counter() - begin
        if t % every:
            copies.append((t, own, load.flat()))
        now = float(idle.reduce(np.array([own]), "max").result()[0])
        yield copies
        if now >= 0.99 * limit:
            return
        segment = tau * max(1, round(min(pause, limit - now) * t / now / tau))
        copies = []


def told(run: Run, options: Options) -> str:
    name, grows = options.primary
    seconds = reached(run, options.target, grows)
    at = "not reached" if seconds is None else f"after {seconds:.1f} s"
    return (
        f"{run['entry']}, message {run['ratio']:g}, repeat {run['repeat']}, tau {run['tau']}"
        f"{' (' + run['said'] + ')' if run['said'] else ''}: {options.target:g} {at}; {name} "
        f"{run['value'][-1]:.4g} after {run['iteration'][-1]:.0f} steps, {run['time'][-1]:.1f} s"
    )


def main(given: WorkerOptions) -> None:
    rank = Rank(given)
    result: dict[str, Any]
    if given.ratio:
        result = {"measured": rank.cells()}
    else:
        nbytes = sum(p.numel() * p.element_size() for p in rank.load.model.parameters())
        result = {"t_g": rank.gradient_seconds(), "bytes": nbytes, "alpha": rank.load.alpha}
    rank.close()
    if rank.comm.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    cli.run(main, WorkerOptions, prog="benchmarks.accuracy.worker")
