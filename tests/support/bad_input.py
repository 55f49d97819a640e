"""Runs of hpc_oldsgd.train that are refused, one after the other in the same processes.

    mpirun -n 3 python tests/refused.py cases.json

A case is {"words": [...]}, the command line. With "full", the disk of that rank is full once there
is a checkpoint; with "cut", these files of all checkpoints are cut short before. After each case
rank 0 prints === and the exit codes of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hpc_oldsgd import tasks, train
from hpc_oldsgd.cli import console
from hpc_oldsgd.data import Arrays, Source
from hpc_oldsgd.tasks.base import Split, Task
from support import fast_disk

real_step = console.Console.step


def arrays(samples: int, bad: int | None = None) -> Arrays:
    x = np.random.default_rng(0).standard_normal((samples, 4)).astype(np.float32)
    if bad is not None:
        x[bad, 2] = np.inf
    return Arrays((x, np.arange(samples) % 2))


@dataclass(kw_only=True)
class Tiny(Task):
    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def source(self, split: Split) -> Source:
        return arrays(2)


@dataclass(kw_only=True)
class InfiniteData(Tiny):
    def source(self, split: Split) -> Source:
        return arrays(20, bad=7)


@dataclass(kw_only=True)
class NoParameters(Tiny):
    def model(self) -> nn.Module:
        return nn.ReLU()

    def source(self, split: Split) -> Source:
        return arrays(20)


@dataclass(kw_only=True)
class TwoTypes(NoParameters):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double())


@dataclass(kw_only=True)
class TwoDevices(NoParameters):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].to("meta")
        model.to = lambda *_: model  # type: ignore[method-assign, assignment]
        return model


@dataclass(kw_only=True)
class NotANumber(NoParameters):
    def model(self) -> nn.Module:
        model = nn.Linear(4, 2)
        with torch.no_grad():
            model.bias[1] = float("nan")
        return model


@dataclass(kw_only=True)
class NoLoss(InfiniteData):
    def source(self, split: Split) -> Source:
        return arrays(20)

    def measure(self, model: nn.Module, batches: object) -> dict[str, float]:
        return {"accuracy": 0.5}


@dataclass(kw_only=True)
class InfiniteTest(Tiny):
    def source(self, split: Split) -> Source:
        return arrays(20, bad=3 if split == "test" else None)


@dataclass(kw_only=True)
class NoTest(Tiny):
    def source(self, split: Split) -> Source:
        return arrays(20 if split == "train" else 0)


TASKS: dict[str, type[Task]] = {
    "tiny": Tiny,
    "infinite-data": InfiniteData,
    "infinite-test": InfiniteTest,
    "no-parameters": NoParameters,
    "two-types": TwoTypes,
    "two-devices": TwoDevices,
    "not-a-number": NotANumber,
    "no-loss": NoLoss,
    "no-test": NoTest,
}


TOPOLOGIES = {
    "wide.csv": ("0.5,0.5,0\n0.5,0.5,0\n", "must be square, and it is 2x3"),
    "words.txt": ("0 one\n", "Line 1 of .* is not numeric"),
    "apart.txt": ("0 1\n2 3\n", "disconnected"),
    "below.csv": ("1.5,-0.5,0\n-0.5,1.5,0\n0,0,1\n", "must not be negative"),
    "short.csv": ("0.5,0.4,0\n0.4,0.5,0.1\n0,0.1,0.9\n", "row 0 sums to 0.9, not 1"),
    "four.txt": ("0 1\n1 2\n2 3\n", "is a graph of 4 agents, not 3"),
}


def contents(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def run(words: list[str], full: int | None, rank: int) -> int:
    out = Path(words[words.index("--out") + 1])

    def step(self: console.Console, t: int) -> None:
        real_step(self, t)
        if rank == full and any(out.glob("checkpoints/*/manifest.json")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    console.Console.step = step  # type: ignore[method-assign]
    sys.argv[1:] = words
    try:
        train.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return 0


def main() -> None:
    from hpc_oldsgd.transport.mpi import world
    from hpc_oldsgd.transport.mpi.requests import gather_text

    for name, kind in TASKS.items():
        tasks.register(name)(kind)
    fast_disk.make_prompt()
    comm = world()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        out = Path(case["words"][case["words"].index("--out") + 1])
        if "cut" in case and comm.rank == 0:
            for file in out.glob(f"checkpoints/*/{case['cut']}"):
                file.write_bytes(file.read_bytes()[:-1])
        gather_text(comm, "cut")
        code = run(case["words"], case.get("full"), comm.rank)
        codes = gather_text(comm, str(code))
        if comm.rank == 0:
            print("=== " + " ".join(codes), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
