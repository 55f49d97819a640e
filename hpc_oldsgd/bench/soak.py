"""Thousands of rounds of a tiny problem while ranks are stopped and let go on at random.

Checked throughout: sum_i (x_i + what agent i has descended) never changes, the mean identity; it is
looked at through a few random directions, every round, by a reduction that lags. Checked in the
end: with `--late wait` all models bit for bit against the simulator; nothing is left under way; no
memory, thread, file or request more than after the first fifth of the rounds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from .. import algorithms, topology
from ..cli.fields import at_least, positive
from ..runs.mpi_start import start_mpi
from ..runtime.plain import Plain
from ..runtime.runner import Runner
from ..simulation.stacked import StackedTransport
from ..transport.base import Pending
from ..transport.late import Late
from .memory import resident

if TYPE_CHECKING:
    from ..transport.mpi import MpiTransport

ALPHA = 0.05
LOOKS = 4  # random directions
ROUNDING = 1e-12  # of the sum's size; a message that only one end has used moves it by 1e-5
GROWTH_BYTES = 8 << 20
TIMEOUT_S = 120.0
STOPPER = Path(__file__).with_name("stopper.py")


@dataclass(frozen=True)
class Options:
    """A long run with random stops of ranks, and what must not have changed; run under mpirun."""

    rounds: int = 10_000
    """Rounds in all."""
    size: int = 10_000
    """Numbers (float64) in the model."""
    algorithm: str = "oldsgd"
    """Which one; it must keep the mean."""
    topology: str = "ring"
    """Who talks to whom."""
    tau: int = 1
    """Local steps a round."""
    stop_every: float = 0.1
    """Mean seconds between two stops of some rank of a machine; 0 for none."""
    stop_seconds: float = 0.02
    """Mean length of a stop."""
    late: Literal["wait", "reuse"] = "wait"
    """What to do about a late neighbour, as in `train`."""
    late_wait: float = 0.005
    """With --late reuse: seconds to stand waiting first."""
    staleness: int = 1
    """With --late reuse: how many rounds in a row an edge may be left out."""
    progress: Literal["auto", "thread", "poll", "none"] = "auto"
    """Who moves the messages."""
    seed: int = 0
    """Of the stops."""
    json: bool = False
    """Print one line of JSON after the text."""

    def __post_init__(self) -> None:
        Late(self.late_wait, self.staleness)
        at_least(10, self, "rounds")
        at_least(1, self, "size", "tau")
        at_least(0, self, "stop_every")
        positive(self, "stop_seconds")


class Problem:
    """Each agent has its own quadratic, which moves with t, so that agents never stop moving."""

    def __init__(self, n: int, d: int) -> None:
        random = np.random.default_rng(7)
        self.centre = torch.from_numpy(random.normal(size=(n, d)))
        self.x0 = torch.from_numpy(random.normal(size=(n, d)) * 10)
        self.look = random.uniform(0.5, 1.5, (LOOKS, d)) * random.choice([-1, 1], (LOOKS, d))

    def gradient(self, i: int | slice, x: torch.Tensor, t: int) -> torch.Tensor:
        return (x - self.centre[i]).add_(float(np.sin(t)))


class Watch:
    """At every boundary: the sum that must stay, and now and then this process's resources."""

    def __init__(self, runner: Plain, problem: Problem, rounds: int, lag: int) -> None:
        self.runner, self.problem, self.lag = runner, problem, lag
        self.descended = torch.zeros_like(runner.x)
        self.worst = 0.0
        self.looks = 0
        self.left_out = 0.0
        self.samples: list[list[float]] = []
        self._every = max(1, rounds // 100)
        self._first: NDArray[np.float64] | None = None
        self._sums: deque[Pending] = deque()
        runner.observers.append(self.boundary)

    def boundary(self, runner: Runner) -> None:
        total = (runner.x + self.descended).numpy()
        own = self.problem.look @ total
        size = np.abs(self.problem.look) @ np.abs(total)
        self._sums.append(runner.transport.reduce(np.concatenate([own, size])))
        if len(self._sums) > self.lag:
            self.count()
        self.left_out += sum(record.left_out for record in runner.transport.records)
        runner.transport.records.clear()
        if runner.r % self._every == 0:
            self.samples.append(resources())

    def count(self) -> None:
        sums, size = np.split(self._sums.popleft().result(), 2)
        if self._first is None:
            self._first = sums
        self.worst = max(self.worst, float((np.abs(sums - self._first) / size).max()))
        self.looks += 1

    def finish(self) -> None:
        while self._sums:
            self.count()

    def growth(self) -> list[float]:
        """Of each resource: the most of the last tenth over the most after the first fifth."""
        table = np.array(self.samples)
        settled = table[len(table) // 5 : max(len(table) // 2, len(table) // 5 + 1)].max(axis=0)
        return (table[-max(1, len(table) // 10) :].max(axis=0) - settled).tolist()


def resources() -> list[float]:
    """Bytes, threads and open files of this process."""
    counts = [len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("task", "fd")]
    return [resident("RssAnon"), *counts]


def requests_too_many(transport: MpiTransport, late: Late | None) -> int:
    """Persistent requests beyond those of the buffers: a send and a receive for each neighbour."""
    graph, i = transport.topology, transport.rank
    phases = [graph.neighbours(i, r) for r in range(graph.period)]
    most = 2 * sum(map(len, phases))
    if late is not None:  # of every snapshot a send, and the neighbour's words
        peers = len({j for phase in phases for j, _ in phase})
        most = peers * (1 + late.staleness * graph.period + 2)
    return sum(channel.made for channel in transport._channels) - most * len(transport._channels)


def run(
    comm: Any, options: Options, spoil: Callable[[Runner], None] | None = None
) -> dict[str, Any]:
    """The verdict, the same on every rank. Tests pass `spoil`, called at every round: it breaks
    something, and the verdict must be bad."""
    from ..transport.mpi import MpiTransport

    graph = topology.from_name(options.topology, comm.size)
    algorithm = algorithms.near_tau(options.algorithm, options.tau)
    late = Late(options.late_wait, options.staleness) if options.late == "reuse" else None
    problem = Problem(comm.size, options.size)
    transport = MpiTransport(comm, graph, progress=options.progress, timeout_s=TIMEOUT_S, late=late)
    runner = Plain(problem.x0[comm.rank].clone(), algorithm, transport, ALPHA)
    if spoil is not None:
        runner.on_round.append(spoil)
    watch = Watch(runner, problem, options.rounds, 1 + (late.staleness if late else 0))
    stopper = _stopper(transport, options)
    start = time.perf_counter()
    _run(runner, problem, comm.rank, options.rounds, watch)
    seconds = time.perf_counter() - start
    stops = int(stopper.communicate()[0]) if stopper is not None else 0
    transport.drain()
    under_way = len(transport._open) + len(transport._numbers)
    too_many = requests_too_many(transport, late)
    numbers = np.array([watch.worst, under_way, seconds, *watch.growth(), too_many])
    worst, under_way, seconds, *growth = transport.reduce(numbers, "max").result().tolist()
    sums = transport.reduce(np.array([stops, watch.left_out])).result()
    same = None if late else _same(comm, options, algorithm, runner.x)
    runner.finish()
    checks = {
        "the mean identity": worst <= ROUNDING and watch.looks >= options.rounds,
        "bit for bit the simulator's models": same is not False,
        "nothing under way": under_way == 0,
        "no growth of memory": growth[0] <= GROWTH_BYTES,
        "no thread more": growth[1] <= 0,
        "no file more": growth[2] <= 0,
        "no request more": growth[3] <= 0,
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "rounds": runner.r,
        "looks": watch.looks,
        "seconds": seconds,
        "stops": int(sums[0]),
        "left_out": float(sums[1]) / (comm.size * options.rounds),
        "mean_error": worst,
        "growth_bytes": growth[0],
        "growth": dict(zip(("threads", "files", "requests"), growth[1:], strict=True)),
        "compared_with_simulator": same is not None,
    }


def _run(
    runner: Plain, problem: Problem, i: int | slice, rounds: int, watch: Watch | None = None
) -> None:
    runner.observers.append(lambda r: r.stop() if r.r == rounds else None)
    runner.start()
    while not runner.finished:
        g = problem.gradient(i, runner.x, runner.t)
        if watch is not None:
            watch.descended.add_(g, alpha=ALPHA)
        runner.advance(g)
    if watch is not None:
        watch.finish()


def main(options: Options) -> None:
    from ..transport.mpi.job import vendor

    comm = start_mpi("hpc_oldsgd.bench soak")
    torch.set_num_threads(1)
    verdict = run(comm, options)
    if comm.rank == 0:
        print(_text(options, verdict, comm.size, vendor()))
        if options.json:
            print(json.dumps({"options": dataclasses.asdict(options), **verdict}))
    if not verdict["passed"]:
        raise SystemExit(1)


def _same(comm: Any, options: Options, algorithm: Any, x: torch.Tensor) -> bool:
    """Whether all ranks ended with what the stacked transport gives: rank 0 runs it again."""
    everything = np.empty((comm.size, x.numel())) if comm.rank == 0 else None
    comm.Gather(x.numpy(), everything, 0)
    same = np.ones(1)
    if everything is not None:
        problem = Problem(comm.size, options.size)
        graph = topology.from_name(options.topology, comm.size)
        stacked = Plain(problem.x0, algorithm, StackedTransport(graph), ALPHA)
        _run(stacked, problem, slice(None), options.rounds)
        same[0] = np.array_equal(stacked.x.numpy(), everything)
    comm.Bcast(same, 0)
    return bool(same[0])


def _stopper(transport: MpiTransport, options: Options) -> subprocess.Popen[str] | None:
    """One for every machine, started by its first rank."""
    ranks = [
        text.split() for text in transport.gather_text(f"{socket.gethostname()} {os.getpid()}")
    ]
    here = [pid for host, pid in ranks if host == socket.gethostname()]
    if not options.stop_every or here[0] != str(os.getpid()):
        return None
    numbers = [options.seed, options.stop_every, options.stop_seconds]
    return subprocess.Popen(
        [sys.executable, "-S", str(STOPPER), *map(str, numbers), *here],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _text(options: Options, v: dict[str, Any], n: int, mpi: str) -> str:
    how = f"{n} ranks, {options.topology}, {options.algorithm}, late: {options.late}, {mpi}"
    lines = [
        f"{how}: {v['rounds']} rounds in {v['seconds']:.0f} s, {v['stops']} stops, "
        f"{v['left_out']:.3f} neighbours left out a round",
        f"mean identity off by {v['mean_error']:.1e} at most, {v['looks']} looks; memory "
        f"{v['growth_bytes'] / 1e6:+.1f} MB",
        *(f"  {'ok  ' if ok else 'FAIL'}  {name}" for name, ok in v["checks"].items()),
        "soak passed" if v["passed"] else "soak FAILED",
    ]
    if not v["compared_with_simulator"]:
        lines[3] = "  --    bit for bit the simulator's models: lateness is not repeatable"
    return "\n".join(lines)
