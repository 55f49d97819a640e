"""CIFAR-10 from the files that torchvision knows: MD5 first, then only the rows asked for."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from ..files import lock
from . import torchvision_shim
from .partition import Ints
from .shard import Rows

FOLDER = "cifar-10-batches-py"
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def published(split: Literal["train", "test"]) -> dict[str, str]:
    """File name -> MD5, as torchvision publishes them."""
    dataset = torchvision_shim.load("CIFAR-10").datasets.CIFAR10
    return dict(dataset.train_list if split == "train" else dataset.test_list)


class Cifar10:
    """A Source: one file of 30 MB is in memory at a time, and then the rows asked for."""

    def __init__(
        self,
        root: Path,
        split: Literal["train", "test"],
        *,
        checksums: Mapping[str, str] | None = None,
    ):
        """`checksums` (file name -> MD5) replaces the published ones, for files of your own."""
        self.folder = root / FOLDER
        self.checksums = published(split) if checksums is None else checksums
        missing = [name for name in self.checksums if not (self.folder / name).is_file()]
        if missing:
            raise UserError(
                f"CIFAR-10 is not here: {self.folder / missing[0]} does not exist; --download "
                f"fetches it into {root}, or unpack cifar-10-python.tar.gz "
                "(https://www.cs.toronto.edu/~kriz/cifar.html) there"
            )

    @cached_property
    def labels(self) -> Ints:
        return np.concatenate([np.array(f["labels"], dtype=np.int64) for f in self._files()])

    def rows(self, indices: Ints) -> Rows:
        """Images (m, 3, 32, 32) uint8 and labels, in the order of `indices`."""
        images = np.empty((len(indices), 3, 32, 32), dtype=np.uint8)
        labels = np.empty(len(indices), dtype=np.int64)
        start = 0
        for file in self._files():
            stop = start + len(file["labels"])
            here = (indices >= start) & (indices < stop)
            images[here] = file["data"][indices[here] - start].reshape(-1, 3, 32, 32)
            labels[here] = np.array(file["labels"])[indices[here] - start]
            start = stop
        return images, labels

    def _files(self) -> Iterator[dict[str, Any]]:
        for name, md5 in self.checksums.items():
            path = self.folder / name
            content = path.read_bytes()
            # The same bytes are hashed and unpickled: nothing can change in between.
            if _md5(content) != md5:
                raise UserError(
                    f"{path} is not CIFAR-10's {name}: its MD5 differs; delete it and get it again "
                    "with --download"
                )
            yield pickle.loads(content, encoding="latin1")


def download(root: Path) -> None:
    """Fetch and unpack the published archive, by one process; the others wait for it.

    If all files are there already, nothing is written: the folder may be read-only.
    """
    if _is_complete(root):
        return
    dataset = torchvision_shim.load("CIFAR-10").datasets.CIFAR10
    try:
        root.mkdir(parents=True, exist_ok=True)
        with lock(root / ".cifar10.lock"):
            dataset(str(root), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"CIFAR-10 could not be fetched from {dataset.url}: {reason}") from error


def _is_complete(root: Path) -> bool:
    files = published("train") | published("test")
    try:
        return all(_md5((root / FOLDER / name).read_bytes()) == md5 for name, md5 in files.items())
    except OSError:
        return False


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
