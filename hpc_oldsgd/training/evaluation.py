"""The mean model, measured while the agents go on.

At a boundary every agent's x starts on its way into an average; when it has arrived everywhere
(agreed by vote, no stall) each rank measures its share of the samples, and the sums travel in
the background as well. The row is written rounds later, under the round it belongs to.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data import Samples, to_device
from ..errors import UserError
from ..runtime.flat import Flat
from ..runtime.runner import Runner
from ..tasks import Task
from ..torch_private import BATCH_NORMS
from ..transport.base import Pending, Reduction

SPLITS = ("train", "test")
PIECE = 1 << 20


class MeanModel:
    """A model of its own that takes the mean of all agents' x and is measured."""

    def __init__(self, task: Task, like: nn.Module, buffers: Any, recalibrate: bool) -> None:
        self.task = task
        self.model = copy.deepcopy(like)
        self.flat = Flat(self.model, buffers)
        self.local = local_buffers(self.model, self.flat)
        self.bn_recalibrated = recalibrate

    def load_local(self, values: NDArray[np.float64]) -> None:
        """Their mean over the agents, one after the other."""
        sizes = [buffer.numel() for buffer in self.local.values()]
        parts = torch.from_numpy(values).split(sizes)
        for buffer, part in zip(self.local.values(), parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def recalibrate(self) -> None:
        """BatchNorm statistics of the mean model itself, over the fixed training sample."""
        norms: list[Any] = [m for m in self.model.modules() if isinstance(m, BATCH_NORMS)]
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain average over all batches
        device = self.flat.x.device
        self.model.train()
        with torch.no_grad():
            for batch in self.task.train_sample(2000).batches(self.task.eval_batch):
                self.task.loss(self.model, to_device(batch, device))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def local_buffers(model: nn.Module, flat: Flat) -> dict[str, Tensor]:
    """Float buffers outside of x: BatchNorm's, where each agent keeps its own."""
    inside = {slot.name for slot in flat.slots}
    buffers = model.named_buffers()
    return {k: b for k, b in buffers if k not in inside and b.is_floating_point()}


@dataclass
class Row:
    """One evaluation under way."""

    r: int
    t: int
    time: float
    reduction: Reduction
    x: Tensor  # as it was, for the exact consensus distance
    local: Pending | None
    sums: Pending | None = None


class Evaluator:
    """Measures f(xbar), the test set and the exact consensus distance of every agent's x."""

    def __init__(
        self,
        runner: Runner,
        mean: MeanModel,
        models: Mapping[int, nn.Module],
        train_samples: int,
        test_samples: int | None,
    ) -> None:
        """`models` are the agents of this process; it measures their share of the samples."""
        self.runner, self.mean, self.task = runner, mean, mean.task
        self.n = runner.transport.n
        self.models = models
        share = min(models) if len(models) < self.n else None
        self.parts = [
            _part(self.task.train_sample(train_samples), share, self.n),
            _part(self.task.test_set(test_samples), share, self.n),
        ]
        self.row: Row | None = None
        self.keys: list[str] = []

    @property
    def arrived(self) -> bool:
        return self.row is not None and self.row.reduction.done()

    def start(self) -> None:
        runner = self.runner
        reduction = runner.transport.snapshot_mean(runner.x, runner.r)
        now, x = runner.transport.now(), runner.x.clone()
        self.row = Row(runner.r, runner.t, now, reduction, x, self._mean_local())

    def _mean_local(self) -> Pending | None:
        if not self.mean.local:
            return None
        rows = []
        for model in self.models.values():
            buffers = dict(model.named_buffers())
            own = [buffers[name].detach().double().flatten() for name in self.mean.local]
            rows.append(torch.cat(own).cpu().numpy())
        return self.runner.transport.reduce(np.sum(rows, axis=0) / self.n, "sum")

    def measure(self) -> None:
        """The mean is here: measure this rank's share, and send the sums on."""
        assert self.row is not None
        start = time.perf_counter()
        row, x = self.row, self.row.x
        own = self.mean.flat.x
        with torch.no_grad():
            xbar = row.reduction.mean(own if x.ndim == 1 else torch.empty_like(x))
            if xbar is not own:
                own.copy_(xbar[0])
        distance = squared_distance(x, own)
        if row.local is not None:
            self.mean.load_local(row.local.result())
        if self.mean.bn_recalibrated:
            self.mean.recalibrate()
        numbers: dict[str, float] = {}
        for split, (samples, weight) in zip(SPLITS, self.parts, strict=True):
            measured = self.task.evaluate(self.mean.model, samples)
            if "loss" not in measured:
                raise UserError(f"measure() of {type(self.task).__name__} must return a loss")
            for key, value in measured.items():
                name = f"{split}_{key.removeprefix('train_')}"
                numbers[name] = value * weight
            numbers[f"{split}_weight"] = weight
        self.keys = sorted(numbers)
        values = np.array([distance, *(numbers[k] for k in self.keys)])
        row.sums = self.runner.transport.reduce(values, "sum")
        if self.runner.trace is not None:
            end = time.perf_counter()
            self.runner.trace.span("evaluate", "measure", start, end, round=row.r)

    def finish(self) -> dict[str, Any]:
        """The numbers, on every rank alike."""
        assert self.row is not None and self.row.sums is not None
        distance, *sums = self.row.sums.result()
        numbers = dict(zip(self.keys, sums, strict=True))
        row = self.row
        result: dict[str, Any] = {"round": row.r, "iteration": row.t, "time": row.time}
        for split in SPLITS:
            weight = numbers.pop(f"{split}_weight")
            for key in [k for k in numbers if k.startswith(f"{split}_")]:
                result[key] = float(numbers[key] / weight)
            if f"{split}_perplexity" in result:  # not a mean over samples
                result[f"{split}_perplexity"] = _exp(result[f"{split}_loss"])
        result["consensus"] = float(distance) / self.n
        self.row = None
        return result


def squared_distance(x: Tensor, xbar: Tensor) -> float:
    """Summed in float64, a piece at a time: no second model-sized buffer."""
    total = 0.0
    for start in range(0, xbar.numel(), PIECE):
        difference = x[..., start : start + PIECE].double() - xbar[start : start + PIECE]
        total += float(difference.square_().sum())
    return total


def _part(samples: Samples, share: int | None, n: int) -> tuple[Samples, float]:
    """A rank's share of the samples and its weight; all of them where all agents are here."""
    if share is None:
        return samples, float(len(samples))
    if share < len(samples):
        part = Samples(tuple(a[share::n] for a in samples.rows), samples.collate)
        return part, float(len(part))
    return Samples(tuple(a[:1] for a in samples.rows), samples.collate), 0.0


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
