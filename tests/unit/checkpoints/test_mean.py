"""The mean of a checkpoint is the mean that the transports take, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_oldsgd import topology
from hpc_oldsgd.checkpoints.mean import mean_state_dict
from hpc_oldsgd.checkpoints.store import Checkpoint, part_name
from hpc_oldsgd.runtime import part_file
from hpc_oldsgd.simulation.stacked import StackedTransport
from support.small_problems import rows


def mean(X: torch.Tensor, folder: Path, kind: str) -> torch.Tensor:
    """Of a checkpoint whose agents' models are the rows: one file each, or all in one."""
    parts = [X] if kind == "simulate" else list(X)
    for k, part in enumerate(parts):
        part_file.write(folder / part_name(k), {"runner": {"x": part}})
    place = {"offset": 0, "shape": [X.shape[1]], "stride": [1]}
    manifest = {
        "run": {"agents": len(X), "kind": kind},
        "shards": [{"file": part_name(k)} for k in range(len(parts))],
        "layout": {"x": place},
    }
    return mean_state_dict(Checkpoint(folder, manifest))["x"]


@pytest.mark.parametrize("kind", ["train", "simulate"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n, d", [(1, 7), (3, 5), (4, 1003), (9, 320)])
def test_it_is_the_average_of_the_run(
    tmp_path: Path, n: int, d: int, dtype: torch.dtype, kind: str
) -> None:
    X = rows(n, d, dtype)
    transport = StackedTransport(topology.from_name("ring", n))
    average = transport.all_reduce(X, 0).mean(torch.empty_like(X))
    found = mean(X, tmp_path, kind)
    assert found.dtype == dtype
    assert torch.equal(found, average[0])


@pytest.mark.parametrize("kind", ["train", "simulate"])
def test_two_large_models_of_16_bits_do_not_overflow(tmp_path: Path, kind: str) -> None:
    X = torch.full((2, 40), 40_000.0, dtype=torch.float16)
    assert torch.equal(mean(X, tmp_path, kind), X[0])
