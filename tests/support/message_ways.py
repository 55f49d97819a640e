"""Every way messages can be moved over MPI, and what the stacked transport makes of the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import ops, topology
from hpc_oldsgd.simulation.stacked import StackedTransport

D = 1003  # divisible by nothing that could hide a slip
WAYS = [
    pytest.param(
        {"progress": progress, "native": native, "staging": staging},
        id=f"{progress}-{'native' if native else 'python'}-{staging}",
        marks=pytest.mark.skipif(native and not ops.native_available(), reason="not built"),
    )
    for progress, native, staging in itertools.product(
        ("thread", "poll", "none"), (True, False), ("auto", "direct", "host")
    )
    if native or staging != "direct"  # to either engine direct is host without the copies
]
if MPI.COMM_WORLD.size > 2:  # each way is tried by one and two ranks; by more, one of each kind
    WAYS = [WAYS[k] for k in (0, 1, 2, 3, 9, 10)]
GRAPHS = ["ring", "complete", "one-peer-ring"]
every_way = pytest.mark.parametrize("way", WAYS)
FAST: dict[str, Any] = {"progress": "thread"}


def mixed(graph: str, X: torch.Tensor, round: int, wire: torch.dtype | None = None) -> torch.Tensor:
    """What the stacked transport makes of the same rows."""
    X = X.clone()
    StackedTransport(topology.from_name(graph, len(X)), wire=wire).exchange(X, round).mix_into(X)
    return X
