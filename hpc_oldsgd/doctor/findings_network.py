"""What is wrong with MPI, the network and the progress of messages, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import links as edges
from .findings import Facts, Finding

HIDES = 0.8  # less than this share hidden by the best mode is worth a warning
COSTS = 0.25  # of a core
LOCKED_BYTES = 1 << 30


def of_mpi(library: dict[str, str], ranks: int) -> Iterator[Finding]:
    if library["threads"] != "multiple" and ranks > 1:
        yield Finding(
            "threads",
            f"MPI grants the thread level {library['threads']}: no thread can move messages, only "
            "the backward pass (--progress poll)",
            "Unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, on Cray set "
            "MPICH_MAX_THREAD_SAFETY=multiple, or use an MPI built with MPI_THREAD_MULTIPLE.",
        )


def of_links(
    links: Sequence[dict[str, Any]], ranks: Facts, network: dict[str, Any]
) -> Iterator[Finding]:
    hosts = [rank["host"] for rank in ranks]

    def ends(link: dict[str, Any]) -> str:
        i, j = link["edge"]
        return f"{i} - {j} ({hosts[i]}, {hosts[j]})" if hosts[i] != hosts[j] else f"{i} - {j}"

    for link in links:
        if not link["intact"]:
            yield Finding(
                "corrupt",
                f"bytes between ranks {ends(link)} arrive changed",
                "Do not train on this network: update or replace the MPI, or take its transports "
                "one by one (FI_PROVIDER=tcp, OMPI_MCA_pml=ob1) until it goes away.",
            )
    # Shared memory has no cable: differences there come from other work on the cores.
    by_card = any(network.get("within a host", {}).get("cards", {}).values())
    slow = [
        e for e in edges.slow(links, hosts) if hosts[e["edge"][0]] != hosts[e["edge"][1]] or by_card
    ]
    narrow = [{*link["edge"]} for link in slow if not link["late"]]
    common = set.intersection(*narrow) if len(narrow) > 1 else set()
    for i in common:
        yield Finding(
            "slow-card",
            f"all slow links end at rank {i} ({hosts[i]})",
            "Look at its host's card and load first, or leave it out (sbatch --exclude).",
        )
    for link in slow:
        if link["late"]:
            text = (
                f"the link {ends(link)} answers after {link['latency_s'] * 1e6:.0f} us, "
                f"usual are {link['usual_latency_s'] * 1e6:.0f} us"
            )
        else:
            text = (
                f"the link {ends(link)} moves {rate(link['bytes_per_s'])}, "
                f"usual are {rate(link['usual_bytes_per_s'])}"
            )
        yield Finding(
            "slow-link",
            text,
            "All agents go at its pace: look at cable, port and load of both hosts, or leave one "
            "of them out (sbatch --exclude).",
        )


def of_network(network: dict[str, Any], ranks: Facts) -> Iterator[Finding]:
    """A faster card that stands idle while the bytes go another way."""
    cards = network.get("between hosts", {}).get("cards", {})
    seen = set()
    for rank in ranks:
        used = cards.get(rank["place"])
        if not used or rank["host"] in seen:
            continue
        known = {one["name"]: one for one in rank["interfaces"]}
        speed = max((known[n]["bits_per_s"] or 0.0 for n in used if n in known), default=0.0)
        idle = [
            one
            for one in rank["interfaces"]
            if one["up"] and one["name"] not in used and (one["bits_per_s"] or 0) > max(speed, 1.0)
        ]
        if idle:
            seen.add(rank["host"])
            fastest = max(idle, key=lambda one: one["bits_per_s"])
            yield Finding(
                "idle-network",
                f"on {rank['host']} the bytes take {' and '.join(used)} while {fastest['name']} "
                f"({fastest['kind']}, {fastest['bits_per_s'] / 1e9:g} Gbit/s) stands idle",
                "Use an MPI that speaks to it: the site's MPI module; OMPI_MCA_pml=ucx with "
                "UCX_NET_DEVICES, or FI_PROVIDER for MPICH.",
            )
            if "InfiniBand" in fastest["kind"] and 0 <= rank["locked_bytes"] < LOCKED_BYTES:
                yield Finding(
                    "locked-memory",
                    f"{rank['host']} lets a process lock {rank['locked_bytes']} bytes, which keeps "
                    "InfiniBand out",
                    "Ask the site for an unlimited `ulimit -l` in jobs.",
                )


def of_progress(progress: dict[str, Any], best: str) -> Iterator[Finding]:
    modes = {result["mode"]: result for result in progress["modes"]}
    chosen = modes[best]
    if chosen["hidden"] < HIDES and chosen["exposed_s"] > 0.1 * chosen["round_s"]:
        yield Finding(
            "not-hidden",
            f"the best progress mode ({best}) hides {chosen['hidden']:.0%} of the communication "
            "where all of it could be",
            "Leave a core to the progress thread (--cpus-per-task, fewer ranks), and look at other "
            "work on the hosts.",
        )
    if chosen["cpu_s"] > COSTS * chosen["round_s"]:
        yield Finding(
            "costly-progress",
            f"progress {best} takes {chosen['cpu_s'] / chosen['round_s']:.0%} of a core",
            "Unset MPICH_ASYNC_PROGRESS and the like, engines that spin; or leave a core to it.",
        )


def of_advice(advice: dict[str, Any], highest: int) -> Iterator[Finding]:
    if "hides a part only" in advice["reason"]:
        yield Finding(
            "network-too-slow",
            f"an exchange takes {advice['exchange_s']:.3g} s: tau = {highest} does not hide it",
            "Use a graph that sends less (--topology one-peer-ring), a larger batch, or a faster "
            "network.",
        )


def rate(bytes_per_s: float) -> str:
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    )
