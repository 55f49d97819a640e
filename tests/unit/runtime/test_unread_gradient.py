"""A schedule with reads_gradient=False that computes with g is told so, and never gets nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import OLDSGD, Algorithm
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm
from hpc_oldsgd.simulation.trajectory import trajectory
from support.small_problems import quadratic, rows
from support.unread_gradient import READS, OwnDirection, Reads

N, D, ALPHA = 3, 4, 0.1


class Vector(nn.Module):
    """x alone."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())


def swarm_of(algorithm: Algorithm) -> Swarm:
    models = [Vector(x) for x in rows(N, D, torch.float64)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=ALPHA) for model in models]
    swarm = Swarm(models, optimizers, algorithm, StackedTransport(topology.from_name("ring", N)))
    swarm.start()
    return swarm


def step(swarm: Swarm, k: int) -> None:
    grad = quadratic(N, D)
    for i, model in enumerate(swarm.models):
        model.x.grad = torch.from_numpy(grad(i, model.x.detach().numpy(), k))
    swarm.step()


def plain(algorithm: Algorithm, rounds: int) -> Any:
    x0 = rows(N, D, torch.float64).numpy()
    return trajectory(algorithm, "ring", x0, quadratic(N, D), ALPHA, rounds).X


@pytest.mark.parametrize("how", READS)
def test_computing_with_it_is_refused(how: str) -> None:
    with pytest.raises(UserError, match="reads_gradient"):
        plain(Reads(how=how), 1)
    with pytest.raises(UserError, match="reads_gradient"):
        step(swarm_of(Reads(how=how)), 0)


@pytest.mark.parametrize("algorithm", [OLDSGD(tau=2), OwnDirection()], ids=["g", "another"])
def test_descend_takes_it_and_any_other_direction(algorithm: Algorithm) -> None:
    swarm = swarm_of(algorithm)
    X = plain(algorithm, 3)
    for k in range(6):
        step(swarm, k)
    d = len(X[0][0])
    np.testing.assert_array_equal(swarm.x[:, :d].numpy(), X[-1])
