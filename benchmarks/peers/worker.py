"""One rank of the comparison: mpirun -n 4 python -m benchmarks.peers.worker [--help]

Of every rank the median over blocks counts (a block is a round of tau steps, or one step of those
that talk at every step), of the ranks the slowest. The ideal is max(tau t_g, t_c) / tau seconds a
step: t_g a step that sends nothing, t_c the exchange alone over the entry's graph and wire (the
ring's for all-reduces), both measured in this run.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

# mypy finds it with a cold cache and misses it with a warm one
from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from hpc_oldsgd import cli, topology
from hpc_oldsgd.bench.overlap import exchange_alone
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.wire import wire_type
from hpc_oldsgd.transport.mpi import MpiTransport, world
from hpc_oldsgd.transport.mpi.job import vendor

from . import report
from .entries import ENTRIES, Entry, alone
from .load import Load

WARM_UP = 2


@dataclass(frozen=True)
class Options:
    """Ours beside DDP and others, on the network that is there; run it under mpirun."""

    load: Literal["sleep", "spin", "vgg11"] = "sleep"
    """The gradient: sleep (a GPU computes), spin (the CPU does), or VGG11 on 3x32x32 images."""
    grad_seconds: float = 0.2
    """How long an emulated gradient takes."""
    model_bytes: int = 40_000_000
    """Size of an emulated model in fp32."""
    tau: int = 5
    """Local steps a round."""
    rounds: int = 5
    """Measured rounds of each, after two that warm up."""
    only: tuple[str, ...] = ()
    """Contestants whose names start with one of these; all if not given."""
    exchange_alone: bool = True
    """Measure exchanges alone, for the ideal; else t_c counts as 0."""
    json: bool = False
    """Print one line of JSON after the table."""

    def __post_init__(self) -> None:
        if min(self.tau, self.rounds) < 1 or self.model_bytes < 64 or self.grad_seconds < 0:
            raise UserError(
                "--tau and --rounds must be at least 1, --model-bytes 64, --grad-seconds 0."
            )
        chosen(self)


def chosen(options: Options) -> list[Entry]:
    for start in options.only:
        if not any(e.name.startswith(start) for e in ENTRIES):
            raise UserError(f"No contestant is called {start}; there are: {names()}.")
    return [e for e in ENTRIES if not options.only or e.name.startswith(options.only)]


def names() -> str:
    return "; ".join(e.name for e in ENTRIES)


class Bench:
    """What all contestants share: the ranks, the load, the clock."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.comm = world()
        self.n, self.rank = self.comm.size, self.comm.rank
        if self.n < 2:
            raise UserError("Alone there is nobody to talk to: mpirun -n 4 python -m ...")
        # Keeps the ranks in step: its waits sleep, and would not take the core of another rank.
        self.idle = MpiTransport(self.comm, topology.from_name("ring", self.n))
        hosts = self.idle.gather_text(socket.gethostname())
        self.hosts = len(set(hosts))
        here = hosts.count(hosts[self.rank])
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
        join_gloo(self.idle)
        self.load = Load(options.load, options.model_bytes // 4, options.grad_seconds, self.rank)
        self.load.calibrate(self._slowest)
        self.t_c: dict[tuple[str, str], float] = {}
        self.t_g, self.cpu_g = 0.0, 0.0

    def everywhere(self, *values: float) -> NDArray[np.float64]:
        """Row i: what rank i gave. Collective."""
        return self.idle.everywhere(*values).result()

    def _slowest(self, call: Callable[[], None]) -> float:
        start = self.idle.barrier()
        call()
        return float(self.everywhere(time.perf_counter() - start).max())

    def exchange_alone(self, graph: str, wire: str) -> float:
        """t_c: the exchange of one round when nobody computes."""
        if not self.options.exchange_alone:
            return 0.0
        if graph == "all-reduce":
            graph, wire = "ring", "fp32"
        if (graph, wire) not in self.t_c:
            transport = MpiTransport(
                self.comm,
                topology.from_name(graph, self.n),
                wire=wire_type(wire, torch.float32),
            )
            x = torch.full((self.load.nbytes // 4,), float(self.rank))
            self.t_c[graph, wire] = exchange_alone(transport, x, repeats=2, warm_up=1)
            transport.close()
        return self.t_c[graph, wire]

    def time(self, entry: Entry) -> dict[str, Any]:
        """Seconds a step of one contestant, and processor seconds of all its threads."""
        tau = 1 if entry.every_step else self.options.tau
        self.load.fresh()
        steps = entry.steps(self.load, self.options.tau)
        next(steps)  # made, and in step; this is the first step of the first round
        self.idle.barrier()
        marks = []
        for block in range(WARM_UP + self.options.rounds):
            for _ in range(tau - (block == 0)):
                next(steps)
            marks.append((time.perf_counter(), time.process_time()))
        x = float(next(iter(self.load.model.parameters())).detach().flatten()[-1])
        steps.close()  # type: ignore[attr-defined]
        wall, cpu = (np.diff(np.array(marks), axis=0)[WARM_UP - 1 :] / tau).T
        ranks = self.everywhere(np.median(wall), np.mean(cpu), wall.min(), wall.max(), x)
        slowest = ranks[ranks[:, 0].argmax()]
        return {
            "step_s": slowest[0],
            "step_min_s": slowest[2],
            "step_max_s": slowest[3],
            "cpu_s": float(ranks[:, 1].mean()),
            "spread": float(np.ptp(ranks[:, 4])),
        }

    def measure_alone(self) -> None:
        result = self.time(Entry("alone", alone))
        self.t_g, self.cpu_g = result["step_s"], result["cpu_s"]

    def measure(self, entry: Entry) -> dict[str, Any]:
        t_c = self.exchange_alone(entry.graph, entry.wire)
        result = self.time(entry)
        ideal = max(self.options.tau * self.t_g, t_c) / self.options.tau
        return {
            "entry": entry.name,
            "graph": entry.graph,
            "wire": entry.wire,
            "ours": entry.ours,
            "blocking": entry.blocking,
            **result,
            "cpu_s": result["cpu_s"] - self.cpu_g,
            "t_c": t_c,
            "ideal_s": ideal,
            "ratio_to_ideal": result["step_s"] / max(ideal, 1e-9),
        }


def join_gloo(transport: MpiTransport) -> None:
    """torch.distributed over the card that MPI uses; rank 0 keeps the store."""
    rank, n = transport.rank, transport.n
    store: Any = None
    where = ""
    if rank == 0:
        store = TCPStore(own_address(), 0, n, is_master=True, wait_for_workers=False)
        where = f"{own_address()} {store.port}"
    address, port = transport.gather_text(where)[0].split()
    hosts = set(transport.gather_text(socket.gethostname()))
    if address.startswith("127.") and len(hosts) > 1:
        raise UserError("Name the card that reaches the other hosts in GLOO_SOCKET_IFNAME.")
    if store is None:
        store = TCPStore(address, int(port), n, is_master=False)
    limit = timedelta(minutes=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)


def own_address() -> str:
    card = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not card:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:  # a name that nobody knows; gloo takes the loopback, too
            return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        asked = struct.pack("256s", card.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(s.fileno(), 0x8915, asked)[20:24])  # SIOCGIFADDR


def main(options: Options) -> None:
    bench = Bench(options)
    bench.measure_alone()
    results, skipped = [], []
    for entry in chosen(options):
        if reason := entry.reason_to_skip(bench.n):
            skipped.append({"entry": entry.name, "reason": reason})
            continue
        results.append(bench.measure(entry))
        if bench.rank == 0:
            said = f"{entry.name}: {results[-1]['step_s']:.4f} s a step"
            print(said, file=sys.stderr, flush=True)
    settings = {
        **dataclasses.asdict(options),
        "ranks": bench.n,
        "hosts": bench.hosts,
        "mpi": vendor(),
        "torch": torch.__version__,
        "network": os.environ.get("HPC_OLDSGD_SLOW_NET", ""),
        "threads": torch.get_num_threads(),
        "bytes": bench.load.nbytes,
        "t_g": bench.t_g,
        "t_c": {f"{g}, {w}": t for (g, w), t in bench.t_c.items()},
        "products": bench.load.products,
    }
    del settings["json"]
    bench.idle.close()
    dist.destroy_process_group()
    if bench.rank:
        return
    run = {"settings": settings, "results": results, "skipped": skipped}
    print(report.table(run))
    if options.json:
        print(json.dumps(run))


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.peers.worker")
