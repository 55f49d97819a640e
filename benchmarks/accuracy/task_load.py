"""What the contestants train: a task's model on this rank's share of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpc_oldsgd.data import seed_model, seed_step

from ..peers.load import Load
from .options import Options


class TaskLoad(Load):
    """The same start and batches for every contestant, others for every seed."""

    at_once = False
    real = True

    def __init__(self, options: Options, rank: int) -> None:
        self.asked, self.rank = options, rank
        self.task = options.make_task()
        self.clip = self.task.clip
        self.alpha = options.alpha or self.task.default_alpha
        self.judged = self.task.model()
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        self.seed = seed
        self.shard = self.task.shard(self.rank, self.asked.ranks, "iid", seed)
        self.shard.batch(0)
        self.fresh()

    def fresh(self) -> None:
        seed_model(self.seed)
        self.k = 0
        self.model = self.task.model()
        self.optimizer = self.make_optimizer(self.model.parameters())

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        if self.asked.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.alpha)
        return torch.optim.SGD(parameters, lr=self.alpha, momentum=self.asked.momentum)

    def gradient(self, model: nn.Module | None = None) -> None:
        seed_step(self.seed, self.rank, self.k)
        self.task.loss(self.model if model is None else model, self.shard.batch(self.k)).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.k += 1

    def flat(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def judge(self, x: Tensor) -> float:
        """The number that counts, of a model with these parameters."""
        nn.utils.vector_to_parameters(x, self.judged.parameters())
        value = self.task.evaluate(self.judged, "test", self.asked.test_samples)
        return float(value[self.asked.primary[0]])


Copy = tuple[int, float, Tensor]  # iteration, this rank's clock, its model


def measure(copies: list[Copy], load: TaskLoad, idle: Any, scratch: Path) -> list[list[float]]:
    """Iterations, times and values of the mean models. Collective.

    The copies go through files: the ranks are on one machine, and their network is slow. Each rank
    measures its share of the models.
    """
    for k, (_, _, x) in enumerate(copies):
        np.save(scratch / f"{k}-{idle.rank}.npy", x.numpy())
    idle.barrier()
    values = np.zeros(len(copies))
    for k in range(idle.rank, len(copies), idle.n):
        x = (
            sum(np.load(scratch / f"{k}-{i}.npy", allow_pickle=False) for i in range(idle.n))
            / idle.n
        )
        value = load.judge(torch.from_numpy(x))
        # No number at all is as far from any target as can be.
        worst = -math.inf if load.asked.primary[1] else math.inf
        values[k] = value if math.isfinite(value) else worst
    values = idle.everywhere(*values).result().sum(axis=0)
    times = idle.reduce(np.array([now for _, now, _ in copies]), "max").result()
    return [[float(t) for t, _, _ in copies], times.tolist(), values.tolist()]
