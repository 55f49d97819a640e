"""How much communication hides behind compute, with an emulated gradient and no model.

Of every rank the median over rounds counts. Of the ranks: the slowest for seconds a round, since
all go at its pace; their mean for transfer and exposed wait. hidden is 1 - exposed / transfer of
those. The ideal round is max(tau t_g, t_c), of the same run: t_g the slowest rank's median
gradient without messages and jitter, t_c the fastest of five exchanges without compute.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .. import algorithms, topology
from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..cli.fields import at_least
from ..errors import UserError
from ..launch.device import choose_device
from ..runs.mpi_start import start_mpi
from ..runtime.runner import Runner
from ..runtime.wire import wire_type
from ..simulation.slowdown import Slowdown, check_jitter
from ..transport.late import Late
from .overlap_text import text

if TYPE_CHECKING:  # the import starts MPI, which --help does not need
    from ..transport.mpi import MpiTransport

WARM_UP = 2  # rounds that open connections and touch buffers for the first time
IDLE_REPEATS = 5


@dataclass(frozen=True)
class Options:
    """Overlap of communication with an emulated gradient; run it under mpirun, no model needed."""

    algorithm: tuple[str, ...] = ("oldsgd", "ldsgd")
    """One or several, measured one after the other."""
    topology: str = "ring"
    """Who talks to whom."""
    tau: int = 5
    """Local steps a round; algorithms that take one step a round keep to it."""
    fragments: tuple[int, ...] = (1,)
    """Fragments in which x travels, one number or several: algorithms that can are measured with
    each, as in --fragments 1 5."""
    grad_seconds: float = 0.2
    """How long a gradient takes."""
    load: Literal["sleep", "spin"] = "sleep"
    """What a gradient does: sleep (a GPU computes) or spin (the CPU does): a fixed number of small
    matrix products, as many as take --grad-seconds when nothing is sent."""
    spin_size: int = 64
    """Side of those matrices: 64 is many tiny ops, 512 a few large ones."""
    model_bytes: int = 40_000_000
    """Size of x in fp32."""
    rounds: int = 10
    """Measured rounds of each algorithm, after two that warm up."""
    wire: Literal["fp32", "bf16", "fp16", "int8", "int4"] = "fp32"
    """Type on the wire."""
    progress: Literal["auto", "thread", "poll", "none"] = "auto"
    """Who moves the messages: a thread, poll (from inside the gradient), or none."""
    polls: int = 22
    """With --progress poll, how often a gradient polls: VGG11 has 22 parameters to hook."""
    engine: Literal["auto", "native", "python"] = "auto"
    """Which progress engine."""
    staging: Literal["auto", "direct", "host"] = "auto"
    """Copies between device and host: auto, direct or host."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where x lives: cpu or cuda."""
    slow: tuple[str, ...] = ()
    """Ranks made slow, as RANK:FACTOR: 3:2.5 takes 2.5 times as long for a gradient."""
    jitter: float = 0.0
    """Relative standard deviation of every gradient's time."""
    late: Literal["wait", "reuse"] = "wait"
    """What to do about a late neighbour, as in `train`."""
    late_wait: float = 1.0
    """With --late reuse: seconds to stand waiting first."""
    staleness: int = 1
    """With --late reuse: how many rounds in a row an edge may be left out."""
    json: bool = False
    """Print one line of JSON after the table."""
    check_agents: int = 0
    """Only check the options, for so many ranks, in one process without MPI."""

    def __post_init__(self) -> None:
        at_least(0, self, "check_agents")
        Late(self.late_wait, self.staleness)
        check_jitter(self.jitter)
        at_least(1, self, "tau", "rounds", "spin_size", "polls")
        at_least(0, self, "grad_seconds")
        at_least(4, self, "model_bytes")
        if not self.algorithm or not self.fragments:
            raise UserError(f"Name an algorithm: {', '.join(algorithms.names())}.")


class Gradient:
    """Takes its time and computes nothing; `wall_s` and `cpu_s` add up what it took."""

    def __init__(self, options: Options, transport: MpiTransport) -> None:
        self.options = options
        self._n, self._rank = transport.n, transport.rank
        self.begin()
        self.jitters = False
        """Off while the gradient is measured alone."""
        self.wall_s = self.cpu_s = 0.0
        self.spins = 0
        self._a = torch.rand(options.spin_size, options.spin_size)
        self._b = torch.empty_like(self._a)
        if options.load == "spin":
            self.spins = self._calibrate(transport)

    def begin(self) -> None:
        """The draws of the jitter begin anew, so that every algorithm meets the same."""
        options = self.options
        self._pace = Slowdown(options.slow, options.jitter, 0, self._n, self._rank)

    def __call__(self, transport: MpiTransport) -> None:
        start, start_cpu = time.perf_counter(), time.thread_time()
        slices = self.options.polls if transport.progress == "poll" else 1
        factor = self._pace.next_factor() if self.jitters else self._pace.factor
        spins = round(self.spins * factor)
        for k in range(slices):
            if self.spins:
                self._spin(spins * (k + 1) // slices - spins * k // slices)
            else:
                time.sleep(self.options.grad_seconds * factor / slices)
            transport.poll()
        self.wall_s += time.perf_counter() - start
        self.cpu_s += time.thread_time() - start_cpu

    def _spin(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._a, self._a, out=self._b)

    def _calibrate(self, transport: MpiTransport) -> int:
        """Products that take --grad-seconds while all ranks compute; as many on every rank."""
        if self.options.grad_seconds == 0:
            return 0
        seconds, times = 0.0, 1
        while seconds < min(0.1, self.options.grad_seconds):
            times *= 2
            start = transport.barrier()
            self._spin(times)
            seconds = float(transport.everywhere(time.perf_counter() - start).result().max())
        return max(1, round(times * self.options.grad_seconds / seconds))


class Emulated(Runner):
    """x and an algorithm; the local step is part of the emulated gradient."""

    alpha = 1.0
    transport: MpiTransport

    def __init__(
        self, x: Tensor, algorithm: Algorithm, transport: MpiTransport, gradient: Gradient
    ) -> None:
        super().__init__(x, algorithm, transport)
        self.g = torch.zeros_like(x) if algorithm.reads_gradient else x
        self.gradient = gradient
        self.boundaries: list[tuple[float, float, float]] = []
        """At every round: wall time, wall time spent in gradients, processor time outside them."""
        self.observers.append(self._mark)

    def step(self) -> bool:
        self.gradient(self.transport)
        return self.advance(self.g)

    def descend(self, g: Tensor) -> None:
        pass

    def _mark(self, _: Runner) -> None:
        spent = self.gradient
        cpu = time.process_time() - (spent.cpu_s if spent.spins else 0.0)  # a sleep's are polls
        self.boundaries.append((time.perf_counter(), spent.wall_s, cpu))


def main(options: Options) -> None:
    chosen = choose(options)
    if options.check_agents:
        topology.from_name(options.topology, options.check_agents)
        Slowdown(options.slow, options.jitter, 0, options.check_agents, 0)
        return
    comm = start_mpi("hpc_oldsgd.bench overlap")
    from ..transport.mpi import MpiTransport
    from ..transport.mpi.job import vendor

    graph = topology.from_name(options.topology, comm.size)
    choose_device(options.device)  # of several GPUs, each rank's own becomes the current one

    def transport() -> MpiTransport:
        return MpiTransport(
            comm,
            graph,
            wire=wire_type(options.wire, torch.float32),
            progress=options.progress,
            staging=options.staging,
            native=None if options.engine == "auto" else options.engine == "native",
            late=Late(options.late_wait, options.staleness) if options.late == "reuse" else None,
        )

    idle = transport()
    hosts = idle.gather_text(socket.gethostname())
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hosts.count(hosts[comm.rank])))
    gradient = Gradient(options, idle)
    t_g = gradient_alone(idle, gradient)
    t_c = exchange_alone(idle, flat_model(options, comm.rank))
    progress, native = idle.progress, idle.native
    idle.close()

    results = [measure(options, one, transport(), gradient, t_g, t_c) for one in chosen]
    if comm.rank:
        return
    settings = {
        **dataclasses.asdict(options),
        "ranks": comm.size,
        "hosts": len(set(hosts)),
        "mpi": vendor(),
        "network": os.environ.get("HPC_OLDSGD_SLOW_NET", ""),
        "progress": progress,
        "engine": "native" if native else "python",
        "threads": torch.get_num_threads(),
        "t_g": t_g,
        "t_c": t_c,
    }
    del settings["json"], settings["check_agents"]
    print(text(settings, results))
    if options.json:
        print(json.dumps({"results": results, "settings": settings}))


def choose(options: Options) -> list[Algorithm]:
    """Each algorithm, and where it can send fragments once for every number of them."""
    chosen: list[Algorithm] = []
    for name in options.algorithm:
        algorithm = algorithms.near_tau(name, options.tau)
        if isinstance(algorithm, Fragmented) and algorithm.tau > 1:
            chosen += [dataclasses.replace(algorithm, fragments=P) for P in options.fragments]
        else:
            chosen.append(algorithm)
    return chosen


def flat_model(options: Options, rank: int) -> Tensor:
    return torch.full((options.model_bytes // 4,), float(rank), device=options.device)


def gradient_alone(transport: MpiTransport, gradient: Gradient) -> float:
    times = []
    for _ in range(IDLE_REPEATS):
        start = transport.barrier()
        gradient(transport)
        times.append(time.perf_counter() - start)
    return float(transport.everywhere(float(np.median(times))).result().max())


def exchange_alone(
    transport: MpiTransport, x: Tensor, repeats: int = IDLE_REPEATS, warm_up: int = WARM_UP
) -> float:
    """Both directions with every neighbour, receives posted first, nobody computing."""
    period = transport.topology.period
    times = []
    for r in range((warm_up + repeats) * period):
        transport.barrier()
        transport.exchange(x, r).wait()
        transport.drain()
        times.append(transport.records[-1].transfer)
    ranks = transport.everywhere(*times).result().max(axis=0).reshape(-1, period)
    return float(ranks[warm_up:].mean(axis=1).min())


def measure(
    options: Options,
    algorithm: Algorithm,
    transport: MpiTransport,
    gradient: Gradient,
    t_g: float,
    t_c: float,
) -> dict[str, Any]:
    runner = Emulated(flat_model(options, transport.rank), algorithm, transport, gradient)
    gradient.jitters = True
    gradient.begin()
    transport.records = deque()  # all of them
    transport.barrier()
    runner.start()
    while runner.r < WARM_UP + options.rounds:
        runner.step()
    wall, in_gradient, cpu = np.diff(np.array(runner.boundaries), axis=0)[WARM_UP:].T
    rounds = range(WARM_UP, WARM_UP + options.rounds)
    flights = [[f for f in transport.records if f.round == r] for r in rounds]
    exposed = np.array([sum(f.exposed for f in flight) for flight in flights])
    own = [
        np.median(wall),
        np.mean(wall),
        np.median([sum(f.transfer for f in flight) for flight in flights]),
        np.median(exposed),
        np.median(cpu),
        np.median(wall - in_gradient - exposed),
        np.mean([sum(f.left_out for f in flight) for flight in flights]),
    ]
    ranks = transport.everywhere(*map(float, own)).result()
    spread = transport.everywhere(*np.percentile(wall, [25, 75])).result()
    runner.finish()
    slowest = int(ranks[:, 0].argmax())
    transfer, waited = ranks[:, 2].mean(), ranks[:, 3].mean()
    sends = transport.n > 1
    return {
        "algorithm": algorithm.name + (f" P={algorithm.P}" if algorithm.P > 1 else ""),
        "fragments": algorithm.P,
        "tau": algorithm.tau,
        "round_s": ranks[slowest, 0],
        "transfer_s": transfer,
        "exposed_s": waited,
        "hidden": max(0.0, 1.0 - waited / transfer) if sends and transfer else 1.0,
        "ratio_to_ideal": ranks[slowest, 0] / max(algorithm.tau * t_g, t_c, 1e-9),
        "round_mean_s": float(ranks[:, 1].max()),
        "round_quartiles_s": spread[slowest].tolist(),
        "cpu_s": float(ranks[:, 4].mean()),
        "rest_s": float(ranks[:, 5].mean()),
        "left_out": float(ranks[:, 6].mean()),
    }
