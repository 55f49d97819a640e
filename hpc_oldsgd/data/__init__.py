"""Data sets, partitions of them over agents, and the order in which an agent draws its samples."""

from .partition import Dirichlet, Iid, Label, Partition, parse
from .seeding import seed_model, seed_step
from .shard import Arrays, Batch, Samples, Shard, Source, to_device

__all__ = [
    "Arrays",
    "Batch",
    "Dirichlet",
    "Iid",
    "Label",
    "Partition",
    "Samples",
    "Shard",
    "Source",
    "parse",
    "seed_model",
    "seed_step",
    "to_device",
]
