"""After the death of an agent the others begin anew: every algorithm, and a checkpoint of then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.runtime.part_file import snapshot
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.stacked import StackedTransport
from support.small_problems import rows

N, D = 4, 7
CENTRE = rows(N, D, torch.float64, seed=1)


def runner_of(name: str, X: Tensor) -> Plain:
    algorithm = algorithms.with_tau(name, 2) or algorithms.get(name)()
    transport = StackedTransport(topology.from_name("ring", N), Clock(N, 1.0))
    return Plain(X.clone(), algorithm, transport, 0.05)


def advance(runner: Plain, rounds: int) -> Tensor:
    """The x after that many rounds, of a gradient that does not depend on time."""
    until = runner.r + rounds
    while runner.r < until:
        runner.advance(runner.x - CENTRE)
    return runner.x.clone()


@pytest.mark.parametrize("name", algorithms.names())
def test_it_is_the_run_that_starts_from_these_models(name: str) -> None:
    """Also when the checkpoint that is taken there, or a checkpoint of its resume, is resumed."""
    runner = runner_of(name, rows(N, D, torch.float64))
    runner.start()
    advance(runner, 3)
    fresh = runner_of(name, runner.x)
    fresh.start()
    expected = advance(fresh, 4)

    saved: list[dict[str, Any]] = []

    def save(at: Plain) -> None:
        saved.append(snapshot(at.state_dict()))
        at.observers.clear()

    runner.observers.append(save)  # type: ignore[arg-type]
    runner.transport.drain()
    runner.begin_anew()
    assert torch.equal(advance(runner, 4), expected)
    for _ in range(2):
        resumed = runner_of(name, torch.zeros(N, D, dtype=torch.float64))
        resumed.observers.append(save)  # type: ignore[arg-type]
        resumed.load_state_dict(saved[-1])
        assert resumed.r == 3 and torch.equal(advance(resumed, 4), expected)
    assert len(saved) == 3
