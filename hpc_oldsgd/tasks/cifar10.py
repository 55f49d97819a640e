"""CIFAR-10 with the paper's two networks, and a small one for CPUs: batch 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from ..data import Batch, Source, cifar
from ..data.shard import Rows
from . import models
from .base import OnDisk, Split
from .registry import register

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
PAD = 4


@dataclass(kw_only=True)
class Cifar10(OnDisk):
    """CIFAR-10, 50,000 training and 10,000 test images."""

    download: bool = False
    """Fetch CIFAR-10 into the data folder if it is not there."""

    augment: bool = False
    """Random crops (4 pixels of padding) and mirrored images."""

    data_name = "CIFAR-10"
    label_names = cifar.LABELS
    checksums: ClassVar[Mapping[Split, Mapping[str, str]] | None] = None
    """File -> MD5 of files that are not the published ones; only code can set this."""

    def source(self, split: Split) -> Source:
        if self.download:
            cifar.download(self.root)
        checksums = None if self.checksums is None else self.checksums[split]
        return cifar.Cifar10(self.root, split, checksums=checksums)

    def collate(self, rows: Rows, rng: np.random.Generator | None) -> Batch:
        images, labels = rows
        if self.augment and rng is not None:
            images = crop_and_mirror(images, rng)
        x = torch.from_numpy(images).to(torch.float32).div_(255).sub_(MEAN).div_(STD)
        return x, torch.from_numpy(labels)


@register("cifar10-small")
@dataclass(kw_only=True)
class Cifar10Small(Cifar10):
    """A small CNN for CPUs on CIFAR-10, 33,946 parameters, with GroupNorm."""

    default_alpha = 0.1
    default_iterations = 3500  # 5 epochs of 9 agents

    def model(self) -> nn.Module:
        return models.small_cnn()


@register("cifar10-vgg11")
@dataclass(kw_only=True)
class Cifar10VGG11(Cifar10):
    """VGG11 on CIFAR-10, 9.23M parameters."""

    batchnorm: bool = False
    """Put a BatchNorm after each convolution."""

    def model(self) -> nn.Module:
        return models.vgg11(self.batchnorm)


@register("cifar10-resnet18")
@dataclass(kw_only=True)
class Cifar10ResNet18(Cifar10):
    """ResNet18 on CIFAR-10, 11.17M parameters, with BatchNorm."""

    def model(self) -> nn.Module:
        return models.resnet18()


def crop_and_mirror(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each (3, 32, 32) image cut from itself padded with zeros, and mirrored every other time."""
    m, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD)))
    top, left = rng.integers(0, 2 * PAD + 1, size=(2, m))
    mirror = np.less(rng.random(m), 0.5)
    y = top[:, None] + np.arange(height)
    x = left[:, None] + np.where(mirror[:, None], np.arange(width)[::-1], np.arange(width))
    cut = padded[np.arange(m)[:, None, None], :, y[:, :, None], x[:, None, :]]
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 2))
