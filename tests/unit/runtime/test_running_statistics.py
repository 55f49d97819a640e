"""BatchNorm's statistics in an overlapped round: averages that forget, mixed as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import LDSGD, OLDSGD, Algorithm
from hpc_oldsgd.runtime.sgd import SGD
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm

N, D = 4, 3


def norm(i: int) -> nn.Module:
    """Constants of every agent's own beside the statistics: float buffers that forget nothing."""
    model = nn.BatchNorm1d(D, momentum=0.2)
    model.register_buffer("constant", torch.tensor([float(i)]))
    return model


def made(algorithm: Algorithm, models: list[nn.Module]) -> Swarm:
    optimizers = [SGD(m.parameters(), lr=0.0) for m in models]
    swarm = Swarm(models, optimizers, algorithm, StackedTransport(topology.from_name("ring", N)))
    swarm.start()
    return swarm


def batch(i: int, k: int) -> torch.Tensor:
    """Now and then one of agent 0's is far wider than all others."""
    wide = 30.0 if i == 0 and k % 20 == 19 else 1.0
    return torch.randn(6, D, generator=torch.Generator().manual_seed(97 * i + k)) * wide + i


def step(swarm: Swarm, k: int, passes: int = 1) -> None:
    for i, model in enumerate(swarm.models):
        for part in range(passes):
            model(batch(i, k * passes + part)).sum().backward()
    swarm.step()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("algorithm", [OLDSGD(tau=5), LDSGD(tau=5)], ids=str)
def test_as_if_mixed_when_they_were_sent(algorithm, passes):
    """The statistics that the same batches give to who starts the round from the mixed ones."""
    swarm = made(algorithm, [norm(i) for i in range(N)])
    W = torch.tensor(topology.from_name("ring", N).matrix())
    late = isinstance(algorithm, OLDSGD)
    means = torch.zeros(N, D, dtype=torch.float64)
    constants = torch.arange(N, dtype=torch.float64)
    for r in range(3):
        if late:
            means = W @ means
        for t in range(5 * r, 5 * r + 5):
            step(swarm, t, passes)
            for k in range(t * passes, (t + 1) * passes):
                batches = torch.stack([batch(i, k).double().mean(0) for i in range(N)])
                means = 0.8 * means + 0.2 * batches
        if not late:
            means = W @ means
        constants = W @ constants
        for i, model in enumerate(swarm.models):
            torch.testing.assert_close(model.running_mean.double(), means[i], rtol=0, atol=1e-5)
            assert float(model.constant) == pytest.approx(float(constants[i]), abs=1e-6)


def average(_: int) -> nn.Module:
    return nn.BatchNorm1d(D, momentum=None)


class Instance(nn.InstanceNorm1d):
    """Of each row of a batch as one instance with a channel for each column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.T[None])


def instance(_: int) -> nn.Module:
    return Instance(D, affine=True, track_running_stats=True)


@pytest.mark.parametrize("kind", [norm, average, instance])
@pytest.mark.parametrize("tau", [1, 20])
def test_variances_stay_positive_and_the_mean_is_kept(tau, kind):
    """With tau = 20 the whole difference of the snapshots, added at the end, makes them explode."""
    models = [kind(0) for _ in range(N)]
    alone = [kind(0) for _ in range(N)]
    swarm = made(OLDSGD(tau=tau), models)
    for k in range(160):
        step(swarm, k)
        for i, model in enumerate(alone):
            model(batch(i, k))
        assert all(bool((m.running_var > 0).all()) for m in models), k
    kept = torch.stack([m.running_var for m in models]).mean(0)
    torch.testing.assert_close(kept, torch.stack([m.running_var for m in alone]).mean(0))


def test_passes_are_counted_once_and_in_training_only():
    model = instance(0)
    made(OLDSGD(tau=2), [model, *(instance(0) for _ in range(N - 1))])
    made(OLDSGD(tau=2), [model, *(instance(0) for _ in range(N - 1))])  # a second agent
    model(batch(0, 0))
    model.eval()(batch(0, 1))
    assert int(model.num_batches_tracked) == 1
