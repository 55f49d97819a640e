"""What is wrong with the machines: each warning with a sentence on how to fix it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.memory import EXTRA

Facts = Sequence[dict[str, Any]]
"""One entry per rank, as machine.facts made it."""
CLOCK_S = 1.0


@dataclass(frozen=True)
class Finding:
    name: str
    text: str
    fix: str


def of_machines(ranks: Facts) -> Iterator[Finding]:
    yield from _versions(ranks)
    for host, members in by_host(ranks).items():
        mine = [ranks[i] for i in members]
        yield from _cores(host, members, mine)
        yield from _gpus(host, members, mine)
    lacking = [i for i, rank in enumerate(ranks) if not rank["extension"]["native"]]
    if lacking:
        yield Finding(
            "extension",
            f"the extension is not in use on {names(lacking)} "
            f"({ranks[lacking[0]]['extension'].get('reason', 'not built')}): mixing is slower",
            "Build it: pip install -e . --no-build-isolation -v shows what is missing.",
        )
    with_gpu = [i for i, rank in enumerate(ranks) if rank["gpu"]]
    without_kernels = [i for i in with_gpu if not ranks[i]["extension"].get("cuda")]
    if without_kernels:
        yield Finding(
            "cuda-kernels",
            f"the extension has no CUDA kernels on {names(without_kernels)}: a GPU mixes by torch",
            "Put nvcc in PATH (module load cuda) and build the extension again.",
        )
    if with_gpu and len(with_gpu) < len(ranks):
        rest = [i for i in range(len(ranks)) if i not in with_gpu]
        yield Finding(
            "mixed-devices",
            f"{names(with_gpu)} have a GPU, {names(rest)} have none and set everybody's pace",
            "Ask for one GPU per task: sbatch --gpus-per-task=1, or --gpus-per-node and as many "
            "tasks.",
        )


def of_clocks(ranks: Facts, offsets: Sequence[float]) -> Iterator[Finding]:
    for host, skew in skews(ranks, offsets).items():
        if abs(skew) > CLOCK_S:
            yield Finding(
                "clock",
                f"the wall clock of {host} is {abs(skew):.1f} s "
                f"{'ahead of' if skew > 0 else 'behind'} that of {ranks[0]['host']}",
                "Let chrony or ntpd run there; measured times do not suffer, dates of files do.",
            )


def skews(ranks: Facts, offsets: Sequence[float]) -> dict[str, float]:
    """How far each host's wall clock is ahead of rank 0's.

    `offsets`: rank 0's steady clock less each rank's.
    """
    first = ranks[0]["wall_less_steady_s"]
    return {
        host: ranks[i]["wall_less_steady_s"] - first - offsets[i]
        for host, (i, *_) in by_host(ranks).items()
    }


def of_memory(ranks: Facts, model_bytes: int, degree: int) -> Iterator[Finding]:
    for host, members in by_host(ranks).items():
        mine = [ranks[i] for i in members]
        on_host = [rank for rank in mine if not rank["gpu"]]
        need = len(on_host) * needed_bytes(model_bytes, degree)
        free = min(rank["memory_bytes"] for rank in mine)
        if need > free:
            yield Finding(
                "memory",
                f"{host} has {free / 1e9:.1f} GB free; {len(on_host)} ranks with a model of "
                f"{model_bytes / 1e9:.2g} GB need about {need / 1e9:.1f} GB",
                "Use fewer ranks a host, ask for more memory (sbatch --mem), --wire bf16, or a "
                "graph of fewer neighbours.",
            )
        for i in members:
            gpu = ranks[i]["gpu"]
            if gpu and needed_bytes(model_bytes, degree) > gpu["free_bytes"]:
                yield Finding(
                    "gpu-memory",
                    f"the GPU of rank {i} has {gpu['free_bytes'] / 1e9:.1f} GB free, the model "
                    f"needs about {needed_bytes(model_bytes, degree) / 1e9:.1f} GB before any "
                    "activation",
                    "Use --wire bf16, a graph of fewer neighbours, or a GPU with more memory.",
                )


def needed_bytes(model_bytes: int, degree: int) -> int:
    """Model and gradient, a snapshot and one model per neighbour, metrics and a checkpoint."""
    return (2 + 1 + degree + sum(EXTRA.values())) * model_bytes


def _versions(ranks: Facts) -> Iterator[Finding]:
    for what in sorted({key for rank in ranks for key in rank["versions"]} | {"MPI"}):
        values = [
            rank["library"]["version"] if what == "MPI" else rank["versions"].get(what, "none")
            for rank in ranks
        ]
        other = [i for i, value in enumerate(values) if value != values[0]]
        if other:
            yield Finding(
                "versions",
                f"{what} is {values[other[0]]} on {names(other)}, {values[0]} on rank 0",
                "Start all ranks from one environment: the same modules and virtual environment on "
                "every host.",
            )


def _cores(host: str, members: Sequence[int], mine: Facts) -> Iterator[Finding]:
    cores = {core for rank in mine for core in rank["cores"]}
    if len(members) > len(cores):
        bound = len(cores) < mine[0]["machine_cores"]
        yield Finding(
            "oversubscribed",
            f"{len(members)} ranks share {len(cores)} of {mine[0]['machine_cores']} cores of "
            f"{host}: they wait for each other's gradients",
            "Give each rank cores of its own: srun --cpu-bind=cores with --cpus-per-task, or "
            "mpirun --bind-to core; or let all use all of them: mpirun --bind-to none."
            if bound
            else "Start at most as many ranks as the host has cores.",
        )
    quota = min((rank["quota"] for rank in mine if rank["quota"]), default=None)
    if quota is not None and quota < min(len(cores), len(members)):
        yield Finding(
            "quota",
            f"the job may use {quota:g} cores' worth of time on {host}, and has {len(members)} "
            "ranks there",
            "Ask for more cores, or start fewer ranks: past the quota all of them are paused.",
        )
    load = max(rank["load"] for rank in mine)
    if load > mine[0]["machine_cores"] + len(members):
        yield Finding(
            "busy",
            f"{host} is busy with other work (load average {load:.1f} on "
            f"{mine[0]['machine_cores']} cores): results will be worse than on a quiet host",
            "Ask for whole nodes (sbatch --exclusive), or run the doctor again when it is quiet.",
        )


def _gpus(host: str, members: Sequence[int], mine: Facts) -> Iterator[Finding]:
    users: dict[str, list[int]] = {}
    for i, rank in zip(members, mine, strict=True):
        if rank["gpu"]:
            users.setdefault(rank["gpu"]["uuid"], []).append(i)
    for shared in users.values():
        if len(shared) > 1:
            yield Finding(
                "shared-gpu",
                f"{names(shared)} share one GPU of {host}",
                "Give each its own: --gpus-per-task=1, or as many tasks a node as it has GPUs.",
            )
    blind = [
        i
        for i, rank in zip(members, mine, strict=True)
        if rank["cuda_visible"] not in ("", "-1", "NoDevFiles") and not rank["gpu"]
    ]
    if blind:
        yield Finding(
            "blind",
            f"CUDA_VISIBLE_DEVICES gives {names(blind)} on {host} a GPU that torch does not see",
            "Install a CUDA build of torch that fits the driver (nvidia-smi shows its version).",
        )


def by_host(ranks: Facts) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, rank in enumerate(ranks):
        found.setdefault(rank["host"], []).append(i)
    return found


def names(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0-3; ranks 0-3, 7."""
    parts: list[list[int]] = []
    for i in ranks:
        if parts and parts[-1][-1] == i - 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    text = ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
