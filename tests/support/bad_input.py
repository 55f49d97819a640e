"""Tasks and topologies that every command refuses."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hpc_oldsgd.data import Arrays, Source
from hpc_oldsgd.launch.launcher import launcher_rank
from hpc_oldsgd.tasks.base import Split, Task


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


@dataclass(kw_only=True)
class OwnLabels(Tiny):
    """Its files are others on rank 2."""

    def source(self, split: Split) -> Source:
        x, y = arrays(20).arrays
        return Arrays((x, 1 - y if launcher_rank() == 2 else y))


@dataclass(kw_only=True)
class Dies(NoParameters):
    """Rank 1 is killed before the first round."""

    def model(self) -> nn.Module:
        if launcher_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Linear(4, 2)


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
    "own-labels": OwnLabels,
    "dies": Dies,
}


TOPOLOGIES = {
    "wide.csv": ("0.5,0.5,0\n0.5,0.5,0\n", "must be square, and it is 2x3"),
    "words.txt": ("0 one\n", "Line 1 of .* is not numeric"),
    "apart.txt": ("0 1\n2 3\n", "disconnected"),
    "below.csv": ("1.5,-0.5,0\n-0.5,1.5,0\n0,0,1\n", "must not be negative"),
    "short.csv": ("0.5,0.4,0\n0.4,0.5,0.1\n0,0.1,0.9\n", "row 0 sums to 0.9, not 1"),
    "four.txt": ("0 1\n1 2\n2 3\n", "is a graph of 4 agents, not 3"),
}
