"""What a task is: a model, a loss, data, and how a trained model is judged.

A task of your own needs `model`, `source` and, unless it classifies, `loss` and `measure`; its
dataclass fields become options. The trainer and the simulator use nothing but this file:

    task = tasks.get("digits")(batch=16)
    seed_model(seed); model = task.model()           # the same start on every agent
    shard = task.shard(i, n, "label:0.7", seed)      # agent i's samples, the only ones in memory
    for k in range(task.default_iterations):
        seed_step(seed, i, k)                        # dropout
        loss = task.loss(model, shard.batch(k))      # batch k is a pure function of (seed, i, k)
    task.evaluate(model)                             # {"test_loss": ..., "test_accuracy": ...}
    task.evaluate(model, "train", limit=1000)        # f(x) on a fixed sample of the training set
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import Batch, Partition, Samples, Shard, Source, parse, to_device
from ..data.folders import data_dir
from ..data.partition import Ints
from ..data.seeding import Use, generator
from ..data.shard import Rows, check_finite
from ..errors import UserError

Split = Literal["train", "test"]


@dataclass(kw_only=True)
class Task(ABC):
    """Base of all: its dataclass fields are its options."""

    batch: int = 8
    """Samples per agent and step."""

    clip: float | None = None
    """Limit on the norm of an agent's whole gradient; none if not given."""

    name: ClassVar[str] = ""
    primary: ClassVar[tuple[str, Literal["max", "min"]]] = ("test_accuracy", "max")
    """The number a run is judged by, and whether more or less of it is better."""
    label_names: ClassVar[tuple[str, ...]] = ()
    """What the labels 0, 1, ... are called, for tables and plots; their numbers if empty."""
    eval_batch: ClassVar[int] = 250
    """Samples per forward pass when a model is measured."""

    # Not dataclass fields: a subclass may set a plain number, or compute one from its options.
    @property
    def default_alpha(self) -> float:
        """The step size when the user names none: the paper's."""
        return 0.01

    @property
    def default_iterations(self) -> int:
        """Steps per agent when the user names no number."""
        return 2000

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"the batch must have at least 1 sample, not {self.batch}")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"the gradient norm limit must be positive, not {self.clip:g}")

    # For subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model, initialised from torch's generator as it stands: the caller seeds it."""

    @abstractmethod
    def source(self, split: Split) -> Source:
        """The training or test set; it need not be in memory."""

    def collate(self, rows: Rows, rng: np.random.Generator | None) -> Batch:
        """Stored rows -> what `loss` takes; a generator comes with training batches only."""
        return tuple(torch.from_numpy(a) for a in rows)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch, a scalar."""
        x, y = batch
        return F.cross_entropy(model(x), y)

    def measure(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """The numbers of a model in eval mode over batches on its device, "loss" among them."""
        total, right, count = 0.0, 0, 0
        for x, y in batches:
            logits = model(x)
            total += float(F.cross_entropy(logits, y, reduction="sum"))
            right += int((logits.argmax(1) == y).sum())
            count += len(y)
        return {"loss": total / count, "accuracy": right / count}

    def fingerprint(self) -> str:
        """What tells this training data from other data; a run goes on only with the same.

        Nothing, the default, where files cannot be others or nobody needs to be warned.
        """
        return ""

    # For the trainer, the simulator and the metrics -------------------------------------------

    def labels(self) -> Ints:
        """One label per training sample."""
        return self._source("train").labels

    def count(self, split: Split = "train") -> int:
        """Number of samples; reads no more than the labels."""
        return len(self._source(split).labels)

    def shard(self, i: int, n: int, partition: str | Partition = "iid", seed: int = 0) -> Shard:
        """Agent i's part of n, the same whichever rank asks."""
        return self.shards([i], n, partition, seed)[0]

    def shards(
        self, agents: Sequence[int], n: int, partition: str | Partition = "iid", seed: int = 0
    ) -> list[Shard]:
        """The parts of several agents; the data is read once for all of them."""
        for i in agents:
            if not 0 <= i < n:
                raise UserError(f"there is no agent {i} among {n}")
        source = self._source("train")
        split = parse(partition).split(source.labels, n, seed)
        parts = [split[i] for i in agents]
        rows = source.rows(np.concatenate(parts))
        if len(parts) == 1:  # a copy of its own, not a view
            return [Shard(agents[0], parts[0], rows, self.batch, seed, self.collate)]
        ends = np.cumsum([len(part) for part in parts])[:-1]
        columns = [np.split(a, ends) for a in rows]
        return [
            Shard(i, part, tuple(own), self.batch, seed, self.collate)
            for i, part, *own in zip(agents, parts, *columns, strict=True)
        ]

    def train_sample(self, size: int | None = None) -> Samples:
        """A fixed sample of the training set for f(xbar): the same on all ranks and in all runs."""
        return self._samples("train", size)

    def test_set(self, limit: int | None = None) -> Samples:
        """The test set, or a fixed sample of it."""
        return self._samples("test", limit)

    def evaluate(
        self, model: nn.Module, on: Split | Samples = "test", limit: int | None = None
    ) -> dict[str, float]:
        """`measure` in eval mode without gradients, e.g. test_loss and test_accuracy.

        Names start with test_ or train_, and with nothing for samples that the caller holds. The
        model's modes are put back, and no random number is drawn.
        """
        samples = on if isinstance(on, Samples) else self._samples(on, limit)
        device = next(model.parameters()).device
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                batches = (to_device(b, device) for b in samples.batches(self.eval_batch))
                numbers = self.measure(model, batches)
        finally:
            for module, training in modes.items():
                module.training = training
        prefix = "" if isinstance(on, Samples) else f"{on}_"
        return {prefix + key: value for key, value in numbers.items()}

    def _samples(self, split: Split, size: int | None) -> Samples:
        """Kept, so that repeated measuring reads no file; the last size asked for of each split."""
        kept: dict[Split, tuple[int | None, Samples]] = self.__dict__.setdefault("_kept", {})
        if split not in kept or kept[split][0] != size:
            if size is not None and size < 1:
                raise UserError(f"a sample needs at least 1 element, not {size}")
            source = self._source(split)
            indices = np.arange(len(source.labels))
            if not len(indices):
                raise UserError(f"the {split} set of {type(self).__name__} is empty")
            if size is not None and size < len(indices):
                indices = np.sort(generator(Use.SAMPLE, 0).permutation(indices)[:size])
            rows = source.rows(indices)
            check_finite("training" if split == "train" else split, rows, indices)
            kept[split] = size, Samples(rows, self.collate)
        return kept[split][1]

    def _source(self, split: Split) -> Source:
        sources: dict[Split, Source] = self.__dict__.setdefault("_sources", {})
        if split not in sources:
            sources[split] = self.source(split)
        return sources[split]


@dataclass(kw_only=True)
class OnDisk(Task):
    """A task whose data is in files."""

    data_dir: Path | None = None
    """Folder with the data sets; HPC_OLDSGD_DATA if not given."""

    data_name: ClassVar[str] = "the data set"

    @property
    def root(self) -> Path:
        return data_dir(self.data_dir, self.data_name)
