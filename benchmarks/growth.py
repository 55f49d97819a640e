"""How cost grows with the model, the degree and the agents: python -m benchmarks.growth (root).

Seconds a round of an emulated gradient and memory of the fullest rank, beside the law they should
follow: max(tau t_g, k c) for OLDSGD with k messages of c seconds, tau t_g + k c for LDSGD,
tau t_g + 2 (n-1)/n c for LSGD; (k + 2) models of memory: x, its snapshot, one from each neighbour.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import networkx as nx
import numpy as np
import torch

from hpc_oldsgd import algorithms, cli, topology
from hpc_oldsgd.bench import overlap
from hpc_oldsgd.bench.memory import resident

from .launch import WIRE, launch, require_slow_net

WARM_UP = 1
TAU = 5
Axis = Literal["parameters", "degree", "agents"]


@dataclass(frozen=True)
class Scan:
    """One axis: its values, and what stays fixed."""

    values: tuple[int, ...]
    ranks: int
    rate_mbit: float
    grad_s: float
    parameters: int = 1_000_000
    algorithms: tuple[str, ...] = ("oldsgd",)


SCANS: dict[str, Scan] = {
    "parameters": Scan((1_000_000, 4_000_000, 10_000_000, 40_000_000, 124_000_000), 4, 1600, 0.1),
    "degree": Scan((2, 4, 8, 16), 17, 170, 0.2),
    "agents": Scan((2, 4, 8, 16, 32), 32, 170, 0.1, algorithms=("oldsgd", "ldsgd", "lsgd")),
}
QUICK: dict[str, Scan] = {
    "parameters": Scan((1_000_000, 4_000_000, 16_000_000), 4, 1600, 0.1),
    "degree": Scan((2, 4, 8), 9, 170, 0.2),
    "agents": Scan((2, 4, 8), 8, 170, 0.1, algorithms=("oldsgd", "ldsgd", "lsgd")),
}


@dataclass(frozen=True)
class Options:
    """Seconds a round and memory against model size, degree and number of agents."""

    axis: tuple[Axis, ...] = ("parameters", "degree", "agents")
    """What grows."""
    rounds: int = 3
    """Measured rounds, after one that warms up."""
    quick: bool = False
    """Fewer and smaller values."""
    output: Path | None = None
    """Folder for growth.json and growth.png."""
    worker: str = ""
    """Set by the command itself: one rank of an axis."""


def main(options: Options) -> None:
    scans = QUICK if options.quick else SCANS
    if options.worker:
        rank(scans[options.worker], options.worker, options.rounds)
        return
    require_slow_net()
    results: dict[str, Any] = {}
    for axis in options.axis:
        scan = scans[axis]
        arguments = ["--worker", axis, "--rounds", options.rounds, *["--quick"] * options.quick]
        results[axis] = launch("benchmarks.growth", arguments, scan.ranks, f"{scan.rate_mbit}mbit")
        print(table(axis, results[axis]), "", sep="\n", flush=True)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "growth.json").write_text(json.dumps(results) + "\n")
        figure(results, options.output / "growth")


# -- one rank --------------------------------------------------------------------------------------


def rank(scan: Scan, axis: str, rounds: int) -> None:
    from hpc_oldsgd.transport.mpi import world

    comm = world()
    torch.set_num_threads(1)
    results = []
    for value in scan.values:
        n = value if axis == "agents" else scan.ranks
        for name in scan.algorithms:
            members = comm.Split(int(comm.rank >= n), comm.rank)
            if comm.rank < n:
                degree = value if axis == "degree" else min(2, n - 1)
                elements = value if axis == "parameters" else scan.parameters
                measured = measure(members, name, degree, elements, scan.grad_s, rounds)
                measured |= law(name, n, degree, elements, scan)
                results.append({axis: value, "algorithm": name, **measured})
                if comm.rank == 0:
                    print(results[-1], file=sys.stderr, flush=True)
            members.Free()
            barrier = comm.Ibarrier()
            while not barrier.Test():  # those with nothing to do leave the cores to the others
                time.sleep(0.02)
    if comm.rank == 0:
        print(json.dumps({"axis": axis, "scan": vars(scan), "results": results}))


def measure(
    comm: Any, name: str, degree: int, elements: int, grad_s: float, rounds: int
) -> dict[str, float]:
    from hpc_oldsgd.transport.mpi import MpiTransport

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier values left is used again, unseen
    before = resident("RssAnon")
    n = comm.size
    if degree == 1:  # two agents
        graph = topology.from_name("ring", n)
    else:
        graph = topology.from_networkx(nx.circulant_graph(n, range(1, degree // 2 + 1)))
    transport = MpiTransport(comm, graph)
    gradient = overlap.Gradient(overlap.Options(grad_seconds=grad_s), transport)
    x = torch.full((elements,), float(comm.rank))
    runner = overlap.Emulated(x, algorithms.get(name)(tau=TAU), transport, gradient)
    transport.reduce(np.zeros(1)).result()
    runner.start()
    while runner.r < WARM_UP + rounds:
        runner.step()
    wall = np.diff([mark[0] for mark in runner.boundaries])[WARM_UP:]
    numbers = np.array([np.median(wall), float(resident("RssAnon") - before)])
    round_s, memory = transport.reduce(numbers, "max").result().tolist()
    runner.finish()
    return {"round_s": round_s, "memory_bytes": memory}


def law(name: str, n: int, degree: int, elements: int, scan: Scan) -> dict[str, float]:
    """What the round and the memory should be."""
    message = 4 * elements * 8e-6 * WIRE / scan.rate_mbit
    compute = TAU * scan.grad_s
    if name == "oldsgd":
        seconds = max(compute, degree * message)
    elif name == "ldsgd":
        seconds = compute + degree * message
    else:
        seconds = compute + 2 * (n - 1) / n * message
    models = 2 + 1 / n if name == "lsgd" else degree + 2
    return {"law_s": seconds, "law_bytes": 4 * elements * models}


# -- the report ------------------------------------------------------------------------------------


def table(axis: str, result: dict[str, Any]) -> str:
    scan = result["scan"]
    lines = [
        f"{axis}: {scan['ranks']} ranks, {scan['rate_mbit']:g} Mbit/s, tau {TAU}, t_g "
        f"{scan['grad_s']:g} s" + ("" if axis == "parameters" else f", {scan['parameters']:,} "
        "parameters"),
        "",
        f"| {axis} | algorithm | round, s | law | ratio | memory, MB | law | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for r in result["results"]:
        lines.append(
            f"| {r[axis]:,} | {r['algorithm']} | {r['round_s']:.3f} | {r['law_s']:.3f} "
            f"| {r['round_s'] / r['law_s']:.3f} | {r['memory_bytes'] / 1e6:.0f} "
            f"| {r['law_bytes'] / 1e6:.0f} | {r['memory_bytes'] / r['law_bytes']:.2f} |"
        )
    return "\n".join(lines)


def figure(results: dict[str, Any], stem: Path) -> None:
    """Above seconds, below memory, one column an axis; dots measured, lines the law."""
    from hpc_oldsgd.plot import curves, style

    with style.figure(stem, ("png",), height=3.4) as fig:
        axes = fig.subplots(2, len(results), squeeze=False)
        for column, (axis, result) in enumerate(results.items()):
            for k, name in enumerate(result["scan"]["algorithms"]):
                rows = [r for r in result["results"] if r["algorithm"] == name]
                at = [r[axis] for r in rows]
                colour = style.PALETTE[k]
                for line, (what, unit) in enumerate((("s", 1.0), ("bytes", 1e6))):
                    ax = axes[line][column]
                    measured = "round_s" if what == "s" else "memory_bytes"
                    ax.plot(at, [r[f"law_{what}"] / unit for r in rows], color=colour, lw=1)
                    dots = [r[measured] / unit for r in rows]
                    ax.plot(at, dots, "o", color=colour, ms=4, label=name)
                    ax.set_xscale("log")
                    if axis != "agents":
                        ax.set_yscale("log")
                        curves.plain_ticks(ax, dots)
                    ax.set_xticks(at, [f"{v / 1e6:g}M" if v >= 1e6 else str(v) for v in at])
                    ax.xaxis.minorticks_off()
            axes[1][column].set_xlabel(axis)
            if axis == "agents":
                for ax in axes[:, column]:
                    ax.set_ylim(bottom=0)
        axes[0][0].set_ylabel("seconds a round")
        axes[1][0].set_ylabel("memory a rank, MB")
        axes[0][-1].legend()


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.growth")
