"""The examination, in order: facts, links, network, progress, advice. Rank 0 prints."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from ..algorithms import OLDSGD
from ..cli.fields import at_least, positive
from ..launch.device import choose_device, set_threads
from ..launch.launcher import check_world, command_of_run
from ..runs.mpi_start import start_mpi
from ..runs.spec import make_topology
from ..runtime.wire import wire_type
from ..topology import Topology, from_name
from ..training.choose import choose
from ..training.measure import graphs_for, message_seconds
from ..training.options import TrainOptions
from ..training.plan import GRAPHS, WIRES, Allowed, Bounds, Measured, Message
from . import findings, findings_network, links, machine, progress, report
from .gpu import examine as gpu

TAUS = Bounds()
LIMIT_S = 600.0  # for a network on which some rank never answers


@dataclass(frozen=True)
class Options:
    """What this machine's MPI, network, GPUs and cores really do; run it under mpirun or srun."""

    topology: str = "ring"
    """Whose edges are measured: a name as for train, or a file."""
    model_bytes: int = 40_000_000
    """Size of the model to be trained, for memory, tau and the largest message."""
    grad_seconds: float = 0.2
    """What a gradient of that model takes, for the recommended tau."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model would live."""
    load: Literal["sleep", "spin"] = "sleep"
    """What the emulated gradient does: sleep (a GPU computes) or spin (the CPU does)."""
    gpu: bool = False
    """Examine the GPU instead: kernel, order of streams, staging, CUDA-aware MPI, and their speed.
    With --device cpu all but the GPU itself is tried."""
    seconds: float = 80.0
    """With --gpu: how long its checks may take together."""
    json: bool = False
    """Print one JSON document instead of the report."""
    check_agents: int = 0
    """Only check the options, for so many ranks, in one process without MPI."""

    def __post_init__(self) -> None:
        at_least(0, self, "check_agents")
        at_least(4, self, "model_bytes")
        positive(self, "grad_seconds", "seconds")


def main(options: Options) -> int:
    config = TrainOptions(topology=options.topology)
    if options.check_agents:
        make_topology(config, options.check_agents)
        return 0
    begin = time.perf_counter()
    comm = start_mpi("hpc_oldsgd.doctor", LIMIT_S)
    from ..transport.mpi import Startup
    from ..transport.mpi.cuda_probe import cuda_aware
    from ..transport.mpi.job import limit

    check_world(comm.size)
    startup = Startup(comm, LIMIT_S)
    device_for = gpu.gpu_or_cpu if options.gpu else choose_device
    device = startup.check(lambda: device_for(options.device))
    alone = options.gpu and comm.size == 1
    topology = startup.check(lambda: gpu.to_itself() if alone else make_topology(config, comm.size))
    set_threads(0, startup.sharing)
    found: dict[str, Any] = {
        "ranks": comm.size,
        "topology": topology.name,
        "machines": _facts(comm, device),
    }
    if options.gpu:
        return gpu.run({**found, "begin": begin}, comm, topology, device, options)
    found |= {"model_bytes": options.model_bytes, "grad_seconds": options.grad_seconds}
    found["clock_offsets_s"] = links.of_every_rank(comm, startup.clock_offset())
    with limit(LIMIT_S, "for the other ranks, while the network was measured"):
        found["cuda_aware"] = cuda_aware(comm, device)
        _measure(found, comm, topology, device, options)
    if comm.rank == 0:
        found["advice"] = advice(found, topology, options)
        found["warnings"] = [dataclasses.asdict(w) for w in warnings(found, topology)]
        found["seconds"] = time.perf_counter() - begin
        print(json.dumps(found) if options.json else report.text(found), flush=True)
    return 0


def _facts(comm: Any, device: Any) -> list[dict[str, Any]]:
    from ..transport.mpi.cuda_probe import says_cuda_aware
    from ..transport.mpi.link_probe import library

    own = {**machine.facts(device), "library": library(), "says_cuda_aware": says_cuda_aware()}
    return links.of_every_rank(comm, own)


def _measure(
    found: dict[str, Any], comm: Any, topology: Topology, device: Any, options: Options
) -> None:
    hosts = [rank["host"] for rank in found["machines"]]
    places = [rank["place"] for rank in found["machines"]]
    edges = links.edges_of(topology)
    found["links"] = links.alone(comm, edges, places, options.model_bytes)
    found["network"] = links.at_once(comm, found["links"], places, hosts)
    threads = found["machines"][0]["library"]["threads"] == "multiple"
    nbytes = progress.size(found["links"], options.model_bytes)
    found["progress"] = progress.measure(comm, topology, device, nbytes, threads, options.load)
    found["messages"] = (
        _messages(comm, graphs_of(topology), device, nbytes) if comm.size > 1 else {}
    )


def graphs_of(topology: Topology) -> dict[str, Topology]:
    """Those that the advised plan is chosen from: the one that was named, and --auto's."""
    names = (topology.name, *(name for name in GRAPHS if name != topology.name))

    def make(name: str) -> Topology:
        return topology if name == topology.name else from_name(name, topology.n)

    return graphs_for(names, make)


def _messages(
    comm: Any, graphs: dict[str, Topology], device: Any, nbytes: int
) -> dict[str, dict[str, float]]:
    """What an exchange of `nbytes` takes on each graph and wire. Collective."""
    from ..transport.mpi import MpiTransport

    x = torch.linspace(-1, 1, nbytes // 4).to(device)
    return {
        f"{name} {wire}": dataclasses.asdict(
            message_seconds(MpiTransport(comm, graph, wire=wire_type(wire, x.dtype)), x)
        )
        for name, graph in graphs.items()
        for wire in WIRES
    }


def advice(found: dict[str, Any], topology: Topology, options: Options) -> dict[str, Any]:
    """A command line for the model and gradient that were named."""
    seen, busy = found["progress"], is_busy(found)
    # On a busy host the modes cannot be told apart: the one that helps most is the safe one.
    best = str(seen["modes"][-1]["mode"]) if busy else progress.best(seen["modes"])
    exchange_s = seen["t_c"] * options.model_bytes / seen["bytes"] if topology.n > 1 else 0.0
    longer = options.model_bytes / seen["bytes"]
    messages = {key: Message(**told).longer(longer) for key, told in found["messages"].items()}
    measured = Measured(options.grad_seconds, messages)
    plan = choose(OLDSGD(), graphs_of(topology), measured, Allowed())
    file = plan.topology == topology.name and Path(options.topology).suffix
    words = [f"--topology {options.topology if file else plan.topology}"]
    words += [f"--progress {best}", f"--wire {plan.wire}", f"--tau {plan.tau}"]
    words += [f"--fragments {plan.fragments}"] if plan.fragments > 1 else []
    note = "; measured on a busy host: ask again when it is quiet" if busy else ""
    return {
        "progress": best,
        "topology": plan.topology,
        "wire": plan.wire,
        "tau": plan.tau,
        "fragments": plan.fragments,
        "exchange_s": exchange_s,
        "reason": plan.reason + note,
        "command": command_of_run(topology.n, " ".join(words)),
    }


def is_busy(found: dict[str, Any]) -> bool:
    """Other work on a host spoils what was measured there."""
    return any(one.name == "busy" for one in findings.of_machines(found["machines"]))


def warnings(found: dict[str, Any], topology: Topology) -> list[findings.Finding]:
    ranks = found["machines"]
    said = chain(
        findings_network.of_mpi(ranks[0]["library"], topology.n),
        findings.of_machines(ranks),
        findings.of_clocks(ranks, found["clock_offsets_s"]),
        findings.of_memory(ranks, found["model_bytes"], topology.degree),
        findings_network.of_links(found["links"], ranks, found["network"]),
        findings_network.of_network(found["network"], ranks),
        findings_network.of_progress(found["progress"], found["advice"]["progress"])
        if topology.n > 1 and not is_busy(found)
        else (),
        findings_network.of_advice(found["advice"], TAUS.high),
    )
    return list(said)
