"""Handwritten digits, 8x8, that come with scikit-learn: real data without a download."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from torch import nn

from ..data import Arrays, Iid, Source
from . import models
from .base import Split, Task
from .registry import register


@register("digits")
@dataclass(kw_only=True)
class Digits(Task):
    """Small CNN on scikit-learn's handwritten digits; no files needed."""

    batchnorm: bool = False
    """Put a BatchNorm after each convolution."""

    default_alpha = 0.1
    default_iterations = 1000

    def model(self) -> nn.Module:
        return models.digits_cnn(self.batchnorm)

    def source(self, split: Split) -> Source:
        return _digits(split)


@register("logistic")
@dataclass(kw_only=True)
class Logistic(Task):
    """Logistic regression on the same digits: convex."""

    batch: int = 32
    """Samples per agent and step."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def source(self, split: Split) -> Source:
        return _digits(split)


def _table() -> Path:
    """scikit-learn's file; its load_digits would first import all of it, a second per rank."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None  # a dependency
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


@cache
def _digits(split: Split) -> Arrays:
    """1,438 training and 359 test images, each label split alike; the same in every run."""
    table = np.loadtxt(_table(), delimiter=",", dtype=np.float32)
    images, labels = table[:, :-1], table[:, -1].astype(np.int64)
    x = images.reshape(-1, 1, 8, 8) / 8 - 1  # 0..16 -> -1..1
    *train, test = Iid().split(labels, 5)
    chosen = test if split == "test" else np.sort(np.concatenate(train))
    return Arrays((x[chosen], labels[chosen]))
