"""What a gradient takes, and a message of each wire on each graph: for `--auto` and its kin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..algorithms import Algorithm
from ..errors import UserError
from ..launch import deadline
from ..runtime.agent_checks import an_algorithm
from ..runtime.wire import check_wire, wire_type
from ..topology import Topology, from_name
from ..transport.base import Transport
from ..transport.device import device_of
from ..transport.narrow import Narrow, check_memory
from .choose import check_overlaps, kinds
from .plan import (
    ANY,
    GRAPHS,
    WIRES,
    Allowed,
    Measured,
    Message,
    Plan,
    parse_auto,
    size_of,
)
from .trial import (
    ENOUGH_S,
    MOST,
    Compute,
    Gradient,
    Trial,
    agreed,
    settle,
    step_seconds,
    untouched,
    without_longest,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.mpi import MpiTransport

GRADIENTS, EXCHANGES = 10, 3  # measured, after one that warms up; more where they are short
PARTS = (512, 64, 8, 1)  # of a model, which are sent one after the other
LONG_S = 5.0  # no further gradients after as many seconds
SLOW_S = 2.0  # no larger part where measuring it would take as long


def make_plan(
    model: nn.Module,
    gradient: Gradient,
    algorithm: Algorithm | str = "oldsgd",
    auto: str | Allowed = ANY,
    comm: MPI.Comm | None = None,
    *,
    graphs: Mapping[str, Topology] | None = None,
    buffers: str = "mix",
    factor: float = 1.0,
    jitter: float = 0.0,
    timeout_s: float | None = 600.0,
    **transport_options: Any,
) -> Plan:
    """Measure and choose, before an Agent is made: the same plan on all ranks. Collective.

    gradient(k) takes a gradient of the model, k is 0 to 10; it is called dozens to hundreds of
    times. The model, its buffers and torch's random numbers are then as before. `auto` narrows the
    choice, as train's --auto does; `graphs` are others than those of that name. `factor` and
    `jitter` are those of agents that are made slow on purpose.

        plan = make_plan(model, lambda k: loss_fn(model(x), y).backward())
        agent = Agent(model, optimizer, plan.apply(OLDSGD()), plan.topology, wire=plan.wire)
    """
    with deadline.limit_start("make_plan", timeout_s):
        from ..transport.mpi import MpiTransport, Startup, world
    comm = world() if comm is None else comm
    startup = Startup(comm, timeout_s)
    algorithm = an_algorithm(algorithm)
    allowed = auto if isinstance(auto, Allowed) else Allowed.of(parse_auto(auto), algorithm)

    def options() -> tuple[dict[str, Topology], list[str], torch.Tensor]:
        x = like_x(model, buffers)
        known = graphs or graphs_for(allowed.graphs, lambda name: from_name(name, comm.size))
        for graph in known.values():
            check_overlaps(algorithm, graph, allowed.tau)
        return dict(known), wires_for(allowed.wires, algorithm, x.dtype), x

    known, wires, x = startup.check(options)
    name, first = next(iter(known.items()))
    if "exchange" not in kinds(algorithm, first):  # an all-reduce knows neither
        known, wires = {name: first}, wires[:1]

    def make(graph: Topology, wire: str) -> MpiTransport:
        kind = wire_type(wire, x.dtype)
        return MpiTransport(comm, graph, wire=kind, timeout_s=timeout_s, **transport_options)

    compute = Compute(model, gradient, 1 + GRADIENTS, factor, jitter)
    measured = all_times(algorithm, known, wires, x, make, startup, compute)

    def trial(plan: Plan) -> float:
        transport = make(known[plan.topology], plan.wire)
        return step_seconds(plan, algorithm, transport, x, compute, measured.gradient)

    def decide(trial: Trial) -> Plan:
        plan, seen = settle(algorithm, known, measured, allowed, trial)
        return about(with_seconds(plan, seen), seen, algorithm, comm.size, model)

    return agreed(startup, trial, decide)


def all_times(
    algorithm: Algorithm,
    graphs: Mapping[str, Topology],
    wires: list[str],
    x: torch.Tensor,
    make: Callable[[Topology, str], MpiTransport],
    startup: Any,
    compute: Compute,
) -> Measured:
    """Of gradients and messages, one after the other. Collective."""
    idle = make(next(iter(graphs.values())), wires[0])
    seconds = gradient_seconds(compute.model, compute.gradient, idle)
    ranks = idle.everywhere(*(value * compute.factor for value in seconds)).result()
    messages, all_reduce = all_messages(algorithm, graphs, wires, x, make, startup, idle)
    took, deviation = ranks.T
    spread = np.hypot(np.sqrt(np.mean((deviation / took) ** 2)), compute.jitter)
    slowest = int(took.argmax())
    return Measured(float(took.max()), messages, all_reduce, slowest, float(spread))


def all_messages(
    algorithm: Algorithm,
    graphs: Mapping[str, Topology],
    wires: list[str],
    x: torch.Tensor,
    make: Callable[[Topology, str], MpiTransport],
    startup: Any,
    idle: MpiTransport,
) -> tuple[dict[str, Message], float]:
    """By graph and wire; and an all-reduce, if the algorithm sends one. Collective; closes idle."""
    first = next(iter(graphs))
    used, all_reduce = kinds(algorithm, graphs[first]), 0.0
    if "all_reduce" in used:
        all_reduce = float(idle.everywhere(all_reduce_seconds(idle, x)).result().max())
    here = 1 if x.is_cuda else idle.hosts.count(idle.hosts[idle.rank])
    idle.close()
    if "exchange" not in used:
        return {f"{first} {wires[0]}": Message(0.0)}, all_reduce
    found = {}
    for name, graph in graphs.items():
        for wire in wires:
            if fits(wire, x, algorithm.exchanged, graph, here, startup):
                found[f"{name} {wire}"] = message_seconds(make(graph, wire), x)
    if not found:
        raise UserError("no wire of --auto fits into the memory of this machine: allow wire=bf16")
    return found, all_reduce


def with_seconds(plan: Plan, measured: Measured) -> Plan:
    """The reason says first what was measured, and last what was tried."""
    message = max(measured.messages[f"{plan.topology} {plan.wire}"].seconds, measured.all_reduce)
    told = (
        f"a gradient takes {short(measured.gradient)} (slowest on rank {measured.slowest}), "
        f"a message {short(message)}"
    )
    tried = [
        f"{short(one.step)} with {one.key}, tau = {one.tau}, P = {one.fragments}"
        for one in measured.tried
    ]
    seen = f"; tried, a step takes {'; '.join(tried)}" if tried else ""
    return replace(plan, reason=f"{told}; {plan.reason}{seen}")


def about(plan: Plan, measured: Measured, algorithm: Algorithm, n: int, model: nn.Module) -> Plan:
    """The plan with all that it says about itself."""
    told, name = asdict(measured), algorithm.name
    return replace(plan, agents=n, algorithm=name, model=size_of(model), measured=told)


# -- what may be measured --------------------------------------------------------------------------


def like_x(model: nn.Module, buffers: str) -> torch.Tensor:
    """As long as what an agent sends, and of its type."""
    sent: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    if buffers == "mix":
        sent += [b for b in model.buffers() if b.is_floating_point()]
    if not sent:
        raise UserError("the model has no parameter that is trained")
    first, d = sent[0], sum(tensor.numel() for tensor in sent)
    return torch.linspace(-1, 1, d, dtype=torch.float32).to(first.device, first.dtype)


def graphs_for(names: tuple[str, ...], make: Callable[[str], Topology]) -> dict[str, Topology]:
    """Each graph once: a ring of three is complete. Of the default ones those there are for n."""
    found: dict[str, Topology] = {}
    for name in names:
        try:
            graph = make(name)
        except UserError:
            if names == GRAPHS:
                continue
            raise
        if graph.digest() not in [known.digest() for known in found.values()]:
            found[name] = graph
    return found


def wires_for(names: tuple[str, ...], algorithm: Algorithm, model: torch.dtype) -> list[str]:
    """From wide to narrow, each once. Of the default ones those that fit the model."""
    found: dict[Any, str] = {}
    for name in names:
        try:
            kind = wire_type(name, model)
            check_wire(algorithm, kind, model)
        except UserError:
            if names == WIRES:
                continue
            raise
        found.setdefault(model if kind is None else kind, name)
    bits = {k: k.bits if isinstance(k, Narrow) else 8 * k.itemsize for k in found}
    return [found[kind] for kind in sorted(found, key=lambda kind: -bits[kind])]


def fits(
    wire: str, x: torch.Tensor, tensors: int, graph: Topology, here: int, startup: Any
) -> bool:
    """Whether all machines have room for a narrow wire's copies. Collective."""
    kind = wire_type(wire, x.dtype)
    if not isinstance(kind, Narrow):
        return True

    def look() -> None:
        check_memory(kind, x, tensors, graph, startup.comm.rank, here)

    try:
        startup.check(look)
    except UserError:
        return False
    return True


# -- the stopwatch ---------------------------------------------------------------------------------


def gradient_seconds(
    model: nn.Module, gradient: Gradient, transport: Transport
) -> tuple[float, float]:
    """Mean and standard deviation of some, while all ranks compute. Collective."""
    device, took = device_of(next(model.parameters()).device), []
    transport.reduce(np.zeros(1)).result()  # all start together
    begin = time.perf_counter()
    with untouched(model):
        for k in range(1 + MOST):
            start = time.perf_counter()
            gradient(k % (1 + GRADIENTS))
            device.synchronize()
            took.append(time.perf_counter() - start)
            since = time.perf_counter() - begin
            if (k >= GRADIENTS and since > ENOUGH_S) or (k and since > LONG_S):
                break
    usual = without_longest(took[1:])  # as in a trial, which is compared with it
    return float(np.mean(usual)), float(np.std(usual))


def message_seconds(transport: Transport, x: torch.Tensor) -> Message:
    """Of the slowest rank, of a graph that changes in its slowest phase. Collective; closes it.

    Larger and larger parts of the model are sent, until the next would be slow: a plan should not
    cost minutes on the links that need it most. The last two make a line.
    """
    sent = x.clone()
    transport.model = sent
    shares: list[float] = []
    took: list[tuple[float, float]] = []  # on its way, and what nothing hides
    measuring = 0.0
    for parts in PARTS:
        share = 1 / parts
        if len(took) > 1 and measuring * share / shares[-1] > SLOW_S:
            break
        if len(x) >= parts:
            transfer, stall, measuring = _exchange(transport, sent[: len(x) // parts], share)
            shares.append(share)
            took.append((transfer, stall))
    transport.close()
    line = np.polyfit(shares[-2:], took[-2:], len(took[-2:]) - 1)
    whole, more = (np.maximum(np.polyval(line, share), 0.0).tolist() for share in (1.0, 0.0))
    return Message(whole[0], more[0], whole[1], more[1])


def _exchange(transport: Transport, x: torch.Tensor, share: float) -> list[float]:
    """On its way; what of it nothing hides; and how long it took to find out."""
    phases, begin = transport.topology.period, time.perf_counter()
    took: list[list[tuple[float, float]]] = []
    while len(took) <= EXCHANGES:  # the first one warms up, and is whole on a narrow wire
        took.append([])
        for phase in range(phases):
            transport.reduce(np.zeros(1)).result()
            start = time.perf_counter()
            transport.exchange(x, len(took) * phases + phase, share).mix_into(x)
            stood = time.perf_counter() - start
            transfer = transport.records[-1].transfer
            took[-1].append((transfer, max(0.0, stood - transfer)))
    own = np.median(took[1:], axis=0).max(axis=0)
    slowest = transport.everywhere(*own, time.perf_counter() - begin).result().max(axis=0)
    return [float(seconds) for seconds in slowest]


def all_reduce_seconds(transport: Transport, x: torch.Tensor) -> float:
    took = []
    for _ in range(1 + EXCHANGES):
        transport.reduce(np.zeros(1)).result()
        transport.all_reduce(x, 0).wait()
        transport.drain()
        took.append(transport.records[-1].transfer)
    return median(took[1:])


def short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
