"""The findings as text, for a terminal or a job's log."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from . import findings
from .findings import by_host, names, needed_bytes
from .findings_network import rate
from .progress import ALONE

EDGES = 16  # listed one by one; of a larger graph the slowest
INDENT = " " * 12


def text(found: dict[str, Any]) -> str:
    lines = [
        f"{head(found, 'hpc_oldsgd.doctor')}, {found['seconds']:.1f} s",
        *_mpi(found),
        *_hosts(found),
        *_devices(found),
        *_network(found),
        *_links(found),
        *_progress(found),
        *_advice(found),
        *_warnings(found),
    ]
    return "\n".join(lines)


def head(found: dict[str, Any], prog: str) -> str:
    hosts = len(by_host(found["machines"]))
    return (
        f"{prog}: {found['ranks']} rank{'s' * (found['ranks'] > 1)} on {hosts} "
        f"host{'s' * (hosts > 1)}, {found['topology']}"
    )


def of_verdict(one: dict[str, Any]) -> Iterator[str]:
    """A check of `--gpu`, and what to do about it."""
    yield _row(one["state"], f"{one['name']}: {one['text']}")
    if one["fix"]:
        yield _row("", one["fix"])


def start_of_gpu(found: dict[str, Any]) -> str:
    return "\n".join([head(found, "hpc_oldsgd.doctor --gpu"), *_mpi(found), *_hosts(found)])


def end_of_gpu(found: dict[str, Any]) -> str:
    verdict = _row("verdict", f"{found['verdict']} ({found['seconds']:.0f} s)")
    return "\n".join([*_warnings(found), verdict])


def _mpi(found: dict[str, Any]) -> Iterator[str]:
    library = found["machines"][0]["library"]
    yield _row("MPI", library["version"])
    yield _row("", f"standard {library['standard']}, thread level {library['threads']}")
    if library["file"]:
        yield _row("", library["file"])


def _hosts(found: dict[str, Any]) -> Iterator[str]:
    ranks = found["machines"]
    for host, members in by_host(ranks).items():
        mine = [ranks[i] for i in members]
        cores = {core for rank in mine for core in rank["cores"]}
        free = min(rank["memory_bytes"] for rank in mine)
        threads = mine[0]["threads"]
        yield _row(
            "host",
            f"{host}: {names(members)}, {len(cores)} of {mine[0]['machine_cores']} cores, "
            f"{threads} torch thread{'s' * (threads > 1)} a rank, {free / 1e9:.1f} GB free, "
            f"load {mine[0]['load']:.1f}",
        )
        for i in members:
            gpu = ranks[i]["gpu"]
            if gpu:
                yield _row("", f"rank {i}: {gpu['name']}, {gpu['free_bytes'] / 1e9:.1f} GB free")


def _devices(found: dict[str, Any]) -> Iterator[str]:
    ranks = found["machines"]
    skews = findings.skews(ranks, found["clock_offsets_s"])
    if len(skews) > 1:
        apart = max(skews.values()) - min(skews.values())
        yield _row("clock", f"the wall clocks of the hosts agree within {apart:.2g} s")
    if not any(rank["gpu"] for rank in ranks):
        yield _row("GPU", "none that torch sees: agents compute on the CPU")
    elif found["cuda_aware"]:
        yield _row("GPU", "MPI moves GPU memory itself: a payload came through intact")
    else:
        says = "says it is CUDA-aware, but a payload did not come through"
        plain = "is not CUDA-aware"
        why = says if ranks[0]["says_cuda_aware"] else plain
        yield _row("GPU", f"this MPI {why}: messages pass through pinned host memory")
    built = ranks[0]["extension"]
    how = f"built by {built['compiler']}, {built['isa']}, " if built["native"] else "not in use, "
    cuda = f"CUDA for {built['cuda_archs']}" if built.get("cuda") else "no CUDA"
    yield _row("extension", how + cuda)


def _network(found: dict[str, Any]) -> Iterator[str]:
    if not found["network"]:
        yield _row("network", "one rank: nothing is sent")
    for kind, seen in found["network"].items():
        ways: dict[str, int] = {}
        for cards in seen["cards"].values():
            way = " and ".join(cards)
            if not way:
                way = "shared memory" if kind == "within a host" else "no card that counts them"
            ways[way] = ways.get(way, 0) + 1
        count = f"{seen['edges']} edge{'s' * (seen['edges'] > 1)}"
        yield _row("network", f"{kind} ({count}) the bytes take {', '.join(ways)}")


def _links(found: dict[str, Any]) -> Iterator[str]:
    links = found["links"]
    if not links:
        return
    shown = links
    if len(links) > EDGES:
        shown = sorted(links, key=lambda link: link["bytes_per_s"])[:EDGES]
        yield _row("links", f"the {EDGES} slowest of {len(links)}")
    head = "" if len(links) > EDGES else "links"
    yield _row(head, f"{'edge':>9}{'latency':>12}{'alone':>14}{'all at once':>14}")
    for link in shown:
        i, j = link["edge"]
        yield INDENT + (
            f"{f'{i} - {j}':>9}{link['latency_s'] * 1e6:>9.0f} us{rate(link['bytes_per_s']):>14}"
            f"{rate(link['at_once_bytes_per_s']):>14}"
        )
    usual = [median(link[key] for link in links) for key in ("bytes_per_s", "at_once_bytes_per_s")]
    wait = median(link["latency_s"] for link in links)
    yield INDENT + f"{'median':>9}{wait * 1e6:>9.0f} us{rate(usual[0]):>14}{rate(usual[1]):>14}"


def _progress(found: dict[str, Any]) -> Iterator[str]:
    seen = found["progress"]
    if found["ranks"] == 1:
        return
    yield _row(
        "progress",
        f"{seen['bytes'] / 1e6:.3g} MB to every neighbour take {seen['t_c'] * 1e3:.1f} ms alone; "
        f"beside two gradients of {seen['t_g'] * 1e3:.1f} ms:",
    )
    yield INDENT + f"{'mode':<8}{'round / ideal':>14}{'hidden':>9}{'processor time':>17}"
    for mode in seen["modes"]:
        yield INDENT + (
            f"{mode['mode']:<8}{mode['ratio_to_ideal']:>14.2f}{mode['hidden']:>9.0%}"
            f"{mode['cpu_s'] * 1e3:>14.1f} ms"
        )
    helped = seen["modes"][0]["hidden"]
    yield INDENT + (
        "messages of this size move without help"
        if helped > ALONE
        else f"messages of this size do not move by themselves: without help {helped:.0%} is hidden"
    )


def _advice(found: dict[str, Any]) -> Iterator[str]:
    advice, model = found["advice"], found["model_bytes"]
    degree = max(sum(i in link["edge"] for link in found["links"]) for i in range(found["ranks"]))
    yield _row(
        "model",
        f"{model / 1e6:g} MB: about {needed_bytes(model, degree) / 1e9:.2g} GB a rank, "
        f"{advice['exchange_s']:.3g} s an exchange; a gradient of {found['grad_seconds']:g} s",
    )
    yield _row("advice", advice["command"])
    yield _row("", advice["reason"])


def _warnings(found: dict[str, Any]) -> Iterator[str]:
    if not found["warnings"]:
        yield _row("warnings", "none")
    for warning in found["warnings"]:
        yield _row("WARNING", f"{warning['text']} [{warning['name']}]")
        yield _row("", f"{warning['fix']}")


def _row(head: str, rest: str) -> str:
    return f"{head:<12}{rest}"
