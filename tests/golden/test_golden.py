"""Trajectories kept in files: a change that should not alter the maths alters no bit of them.

After a change that should: `pytest tests/golden --regenerate-golden`, and say why in the commit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_oldsgd import algorithms
from hpc_oldsgd.simulation.trajectory import trajectory

FOLDER = Path(__file__).parent
N, D, ROUNDS, ALPHA = 5, 6, 4, 0.0625
RUNS = {
    "ring": {"topology": "ring"},
    "one_peer": {"topology": "one-peer-ring"},
    "bf16": {"topology": "ring", "wire": torch.bfloat16},
    "fp32_model": {"topology": "complete", "dtype": np.float32},
}


def grid(rows: int, columns: int, step: int) -> np.ndarray:
    """Rank-distinct numbers without a random generator: multiples of 1/64."""
    return (np.arange(rows * columns).reshape(rows, columns) * step % 257 - 128) / 64.0


def run(name: str, topology: str, dtype: type = np.float64, **options: object) -> dict:
    centre, curvature = grid(N, D, 37).astype(dtype), (grid(N, D, 11) / 4 + 1).astype(dtype)
    noise = grid(64, D, 101).astype(dtype) / 8

    def grad(i: int, x: np.ndarray, k: int) -> np.ndarray:  # +, -, * only: the same everywhere
        return curvature[i] * (x - centre[i]) + noise[(7 * k + i) % 64]

    cls = algorithms.get(name)
    algorithm = cls() if cls().tau == 1 else cls(tau=3)
    x0 = grid(N, D, 53).astype(dtype)
    result = trajectory(algorithm, topology, x0, grad, ALPHA, ROUNDS, 2.5, **options)
    return {"X": result.X, "time": result.time, "wait": result.wait}


@pytest.mark.parametrize("name", algorithms.names())
def test_trajectories_are_those_on_file(name, request):
    path = FOLDER / f"{name}.npz"
    now = {
        f"{key}_{what}": array
        for key, settings in RUNS.items()
        for what, array in run(name, **settings).items()
    }
    assert all(np.isfinite(array).all() for array in now.values())
    if request.config.getoption("--regenerate-golden"):
        np.savez(path, **now)
    assert path.exists(), f"{path.name} is not there: run once with --regenerate-golden"
    with np.load(path) as kept:
        assert sorted(kept.files) == sorted(now)
        for key, array in now.items():
            assert kept[key].dtype == array.dtype
            assert np.array_equal(kept[key], array), key
