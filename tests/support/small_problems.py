"""Small problems with an answer of their own for every agent, so that no mix-up can cancel out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpc_oldsgd.topology import Topology

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def rows(n: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """X, (n, d): row i is agent i's."""
    X = np.random.default_rng(seed).normal(size=(n, d)) * (1 + np.arange(n))[:, None]
    return torch.from_numpy(X).to(dtype)


def quadratic(n: int, d: int, dtype: type = np.float64) -> Callable[[int, Any, int], Any]:
    """grad(i, x, k) of a quadratic of agent i's own, perturbed anew at every draw k."""
    rng = np.random.default_rng(1)
    centre = rng.normal(size=(n, d)).astype(dtype)
    curvature = rng.uniform(0.5, 2.0, size=(n, d)).astype(dtype)
    return lambda i, x, k: curvature[i] * (x - centre[i]) + dtype(0.01 * np.sin(k + i))


def literal_oldsgd(
    X: np.ndarray, W: Callable[[int], np.ndarray], grad: Any, alpha: float, tau: int, T: int
) -> np.ndarray:
    """The paper's update, iteration by iteration, from a list of all iterates and gradients."""
    n = len(X)
    x, g = [X.copy()], []
    for t in range(1, T + 1):
        g.append(np.stack([grad(i, x[-1][i], t - 1) for i in range(n)]))
        if t % tau:
            x.append(x[-1] - alpha * g[-1])
        else:
            x.append(W(t // tau - 1) @ x[t - tau] - alpha * sum(g[t - tau : t]))
    return np.stack(x)


def cnn(seed: int = 0, batchnorm: bool = True) -> nn.Module:
    """BatchNorm, a parameter used twice, a frozen layer, sizes that fill no cache line."""
    torch.manual_seed(seed)
    shared = nn.Linear(7, 7)
    frozen = nn.Linear(7, 7)
    frozen.requires_grad_(False)
    norm = [nn.BatchNorm2d(5)] if batchnorm else []
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(5 * 6 * 6, 7)),
        *(shared, nn.Tanh(), shared, frozen, nn.Tanh(), nn.Linear(7, 3)),
    )


def batch(i: int, k: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Agent i's k-th batch."""
    g = torch.Generator().manual_seed(1000 * i + k)
    return torch.randn(size, 1, 8, 8, generator=g), torch.randint(3, (size,), generator=g)


def backward(model: nn.Module, i: int, k: int) -> Tensor:
    inputs, labels = batch(i, k)
    loss: Tensor = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.detach()


def random_topologies(n: int, seed: int) -> Iterator[Topology]:
    """Doubly stochastic W of random connected graphs with random weights."""
    from hpc_oldsgd.topology import from_matrix

    rng = np.random.default_rng(seed)
    while True:
        W = np.zeros((n, n))
        order = rng.permutation(n)
        edges = list(itertools.pairwise(order))  # a path: connected
        edges += [(i, j) for i in range(n) for j in range(i) if rng.random() < 0.4]
        for i, j in edges:
            W[i, j] = W[j, i] = rng.uniform(0.05, 0.9) / n
        np.fill_diagonal(W, 1 - W.sum(axis=1))
        yield from_matrix(W)
