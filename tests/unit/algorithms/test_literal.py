"""Every algorithm is its paper's equations: schedules against independent transcriptions."""

from __future__ import annotations

import numpy as np
import pytest

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.simulation.trajectory import trajectory
from support import paper_equations

ROUNDS = 12
ALPHA = 0.05
OTHER_OPTIONS = {
    "oldsgd": {"form": "gradient"},
    "kgt": {"eta_s": 0.7},
    "lugt": {"eta": 0.6},
    "olgt": {"eta": 0.6},
    "led": {"beta": 0.3},
    "oled": {"beta": 0.3},
    "overlap_local_sgd": {"a": 0.4, "gamma": 0.2},
    "xoldsgd": {"gamma": 0.4},
    "diloco": {"outer": 0.5, "outer_momentum": 0.4},
    "eager_diloco": {"outer": 0.5, "outer_momentum": 0.4},
    "noloco": {"outer": 0.6, "outer_momentum": 0.3, "pull": 0.9},
    "moldsgd": {"outer": 0.5, "outer_momentum": 0.4},
    "co2": {"beta": 0.8, "outer": 0.9, "Lambda": 1.5, "clip_m": 0.05},
}


CASES = [
    (name, tau, options)
    for name in algorithms.names()
    for tau in paper_equations.taus(name)
    for options in ({}, OTHER_OPTIONS.get(name))
    if options is not None
]


def test_every_algorithm_has_a_transcription() -> None:
    assert set(paper_equations.ALL) == set(algorithms.names())


@pytest.mark.parametrize("graph", ["ring", "torus", "one-peer-ring"])
@pytest.mark.parametrize(("name", "tau", "options"), CASES)
def test_equals_the_equations(name: str, tau: int, options: dict[str, object], graph: str) -> None:
    n = 9
    problem = paper_equations.Quadratics(n, 7, seed=tau, noise=0.3)
    network = topology.from_name(graph, n)
    algorithm = algorithms.get(name)(tau=tau, **options)
    ours = trajectory(algorithm, network, problem.x0, problem.grad, ALPHA, ROUNDS, batched=True)
    options = {k: v for k, v in options.items() if k != "form"}
    expected = paper_equations.ALL[name](
        problem.x0, problem.grad, network.matrix, ALPHA, tau, ROUNDS, **options
    )
    assert np.abs(ours.X[-1] - problem.x0).max() > 0.1  # it went somewhere
    np.testing.assert_allclose(ours.X, expected, rtol=0, atol=1e-10)
