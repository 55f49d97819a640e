"""What a process holds in memory."""

from __future__ import annotations

import gc

import torch


def count_from_now() -> None:
    """What earlier tests have left may go at any time, and takes long to look through."""
    gc.freeze()


def tensor_bytes() -> int:
    """Of all tensors that are alive, and were made since `count_from_now`."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
