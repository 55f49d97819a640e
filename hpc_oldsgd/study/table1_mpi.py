"""Table 1 from real messages: MPI between ranks, a gradient that sleeps, c measured on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import topology
from ..algorithms import Algorithm
from ..runtime.plain import Plain
from ..topology import Topology
from ..transport.mpi import MpiTransport, world
from .formulas import WARM_UP, Measured, evaluate, text_of
from .report import duration
from .table1 import rows

if TYPE_CHECKING:
    from .table1 import Options

ALONE = 7  # repetitions of a message that is timed alone
QUICK_ROUNDS = 3


def measure(options: Options) -> tuple[list[str], list[Measured]]:
    """What a reader must know, on rank 0, and the measurements. Collective."""
    comm = world()
    graph = topology.from_name(options.topology, comm.size)
    torch.set_num_threads(1)
    rounds = min(options.rounds, QUICK_ROUNDS) if options.quick else options.rounds
    x = torch.full((options.model_bytes // 4,), float(comm.rank))

    transport = MpiTransport(comm, graph)
    out = torch.empty_like(x)
    c_s = alone(transport, lambda r: transport.exchange(x, r).mix(out))
    a_s = alone(transport, lambda r: transport.all_reduce(x, r).mean(out))
    g_s = alone(transport, lambda r: time.sleep(options.grad_seconds))
    transport.close()

    cells = list(rows(options))
    expected = [evaluate(made.name, made.tau * g_s, c_s, a_s) for _, made in cells]
    if comm.rank == 0:
        seconds = (WARM_UP + rounds) * sum(e or 0.0 for e in expected)
        print(f"{len(cells)} cells, {duration(seconds)}", flush=True)
    c = c_s / g_s if g_s else float("inf")
    measured = [
        Measured(name, text_of(made.name), comm.size, made.tau, c, known,
            round_seconds(options, made, graph, x, rounds))
        for (name, made), known in zip(cells, expected, strict=True)
    ]  # fmt: skip
    if comm.rank:
        return [], measured
    return [
        f"{comm.size} ranks, {options.topology}, {options.model_bytes / 1e6:g} MB; formula / "
        f"measured, medians of {rounds} rounds, in seconds.",
        f"alone: gradient {g_s:.4f} s, exchange c {c_s:.4f} s, ring all-reduce {a_s:.4f} s (in "
        "place of 2(n-1)/n c: an exchange is a message to every neighbour).",
    ], measured


def alone(transport: MpiTransport, action: Callable[[int], object]) -> float:
    """Median seconds of something that all ranks begin together, of the slowest rank."""
    times = []
    for r in range(WARM_UP + ALONE):
        start = transport.barrier()
        action(r)
        times.append(time.perf_counter() - start)
    return slowest(transport, float(np.median(times[WARM_UP:])))


def round_seconds(
    options: Options, algorithm: Algorithm, graph: Topology, x: torch.Tensor, rounds: int
) -> float:
    transport = MpiTransport(world(), graph)
    runner = Plain(x.clone(), algorithm, transport, alpha=0.1)
    boundaries: list[float] = []
    runner.observers.append(lambda _: boundaries.append(time.perf_counter()))
    g = torch.zeros_like(x)
    transport.barrier()
    runner.start()
    while runner.r < WARM_UP + rounds:
        time.sleep(options.grad_seconds)
        runner.advance(g)
    median = float(np.median(np.diff(boundaries)[WARM_UP:]))
    seconds = slowest(transport, median)
    runner.finish()
    return seconds


def slowest(transport: MpiTransport, seconds: float) -> float:
    return float(transport.reduce(np.array([seconds]), "max").result()[0])
