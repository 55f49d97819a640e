"""Latency and bandwidth of every edge: alone, then with all edges at once, on known counters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..topology import Topology
from . import network

if TYPE_CHECKING:
    from mpi4py import MPI

Edge = tuple[int, int]
SMALL, FIRST, LARGEST = 8, 1 << 16, 1 << 24  # bytes
PINGS, REPEATS = 40, 3
EDGE_S, ALL_S, TOTAL_S = 0.05, 0.1, 6.0  # one message of an edge, of all edges; everything
SLOW, LATE, LATE_S = 0.5, 3.0, 50e-6
LIMIT_S = 120.0  # for one edge: after that, no byte comes through


def of_every_rank(comm: MPI.Comm, own: Any) -> list[Any]:
    """What every rank has found, on all of them. Collective."""
    from ..transport.mpi.collectives import gather_text

    return [json.loads(text) for text in gather_text(comm, json.dumps(own))]


def edges_of(topology: Topology) -> list[Edge]:
    """Of all rounds of a graph that changes."""
    return sorted({edge for r in range(topology.period) for edge in topology.edges(r)})


def colours(edges: Sequence[Edge], places: Sequence[str]) -> list[list[Edge]]:
    """Groups that can be measured at the same time: no two edges share a rank or a card."""
    groups: list[tuple[list[Edge], set[Any]]] = []
    for i, j in edges:
        touched: set[Any] = {i, j}
        if places[i] != places[j]:
            touched |= {places[i], places[j]}
        group = next((g for g in groups if not g[1] & touched), None)
        if group is None:
            group = ([], set())
            groups.append(group)
        group[0].append((i, j))
        group[1].update(touched)
    return [edges for edges, _ in groups]


def alone(
    comm: MPI.Comm, edges: Sequence[Edge], places: Sequence[str], largest: int
) -> list[dict[str, Any]]:
    """Every edge, measured by its lower rank. Collective; the result is on every rank."""
    from ..transport.mpi import link_probe
    from ..transport.mpi.job import limit

    groups = colours(edges, places)
    share_s = min(EDGE_S, TOTAL_S / max(1, len(groups)) / (2 * REPEATS + 2))
    measured = []
    for group in groups:
        link_probe.barrier(comm)
        mine = next((edge for edge in group if comm.rank in edge), None)
        if mine is None:
            continue
        peer = mine[0] if comm.rank == mine[1] else mine[1]
        with limit(LIMIT_S, f"for rank {peer} ({places[peer]}) to answer"):
            link_probe.ping(comm, peer, SMALL, 3)
            latency, intact = link_probe.ping(comm, peer, SMALL, PINGS)
            first, _ = link_probe.ping(comm, peer, FIRST, 2)
            wanted = int(FIRST * share_s / min(first))
            size = link_probe.same_size(comm, peer, max(SMALL, min(largest, LARGEST, wanted)))
            link_probe.ping(comm, peer, size, 1)
            took, whole = link_probe.ping(comm, peer, size, REPEATS)
        if comm.rank == mine[0]:
            measured.append(
                {
                    "edge": list(mine),
                    "latency_s": min(latency),  # the smallest is the link's own, the rest is noise
                    "bytes": size,
                    "bytes_per_s": size / min(took),
                    "intact": intact and whole,
                }
            )
    link_probe.barrier(comm)
    found = chain.from_iterable(of_every_rank(comm, measured))
    return sorted(found, key=lambda link: link["edge"])


def at_once(
    comm: MPI.Comm, links: list[dict[str, Any]], places: Sequence[str], hosts: Sequence[str]
) -> dict[str, Any]:
    """All edges within hosts, then all between hosts: bandwidths, and the cards that carry them.

    Adds `at_once_bytes_per_s` to the links. Collective.
    """
    from ..transport.mpi import link_probe

    slowest = min((link["bytes_per_s"] for link in links), default=0.0)
    largest = max((link["bytes"] for link in links), default=0)
    size = int(max(FIRST, min(largest, ALL_S * slowest)))
    seconds: dict[Edge, float] = {}
    found: dict[str, Any] = {}
    for kind in ("within a host", "between hosts"):
        edges = [
            (i, j)
            for i, j in (link["edge"] for link in links)
            if (hosts[i] == hosts[j]) == (kind == "within a host")
        ]
        if not edges:
            continue
        peers = [i + j - comm.rank for i, j in edges if comm.rank in (i, j)]
        link_probe.all_at_once(comm, peers, size)  # opens connections
        before = network.counters()
        runs = [link_probe.all_at_once(comm, peers, size) for _ in range(REPEATS)]
        after = network.counters()
        own = {
            "rises": {name: after[name] - before.get(name, 0) for name in after},
            "sent": REPEATS * size * len(peers),
            "took": {j: [run[k] for run in runs] for k, j in enumerate(peers)},
        }
        everybody = of_every_rank(comm, own)
        # Both ways at once; a rank that starts late finds the bytes already there.
        for i, j in edges:
            took = everybody[i]["took"][str(j)], everybody[j]["took"][str(i)]
            seconds[i, j] = min(map(max, *took))
        cards = network.by_place(
            places, [one["rises"] for one in everybody], [one["sent"] for one in everybody]
        )
        found[kind] = {"edges": len(edges), "bytes": size, "cards": cards}
    for link in links:
        i, j = link["edge"]
        link["at_once_bytes_per_s"] = size / seconds[i, j]
    return found


def slow(links: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Edges far behind the others of their kind: within a host, or between hosts."""
    named = []
    for within in (True, False):
        kind = [
            link for link in links if (hosts[link["edge"][0]] == hosts[link["edge"][1]]) == within
        ]
        if len(kind) < 3:
            continue
        # One bad card slows several edges, so the better quarter counts as usual.
        usual_rate = float(np.percentile([link["bytes_per_s"] for link in kind], 75))
        usual_wait = float(np.percentile([link["latency_s"] for link in kind], 25))
        for link in kind:
            slow_rate = link["bytes_per_s"] < SLOW * usual_rate
            late = link["latency_s"] > max(LATE * usual_wait, usual_wait + LATE_S)
            if slow_rate or late:
                named.append(
                    {**link, "usual_bytes_per_s": usual_rate, "usual_latency_s": usual_wait,
                     "late": late and not slow_rate}
                )  # fmt: skip
    return named
