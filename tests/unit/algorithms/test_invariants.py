"""What the theory says is kept exactly, for any graph, size, tau and wire type."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.trajectory import trajectory
from support import paper_equations

ALPHA = 0.05
NOT_PLAIN_SGD = (  # their anchor and outer momentum move the mean
    "overlap_local_sgd", "co2", "diloco", "eager_diloco", "noloco",
    "moldsgd",
)  # fmt: skip
MEAN_FOLLOWS_SGD = [name for name in algorithms.names() if name not in NOT_PLAIN_SGD]

cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 8),
        "d": st.integers(1, 9),
        "tau": st.integers(1, 5),
        "graph": st.sampled_from(["ring", "complete", "one-peer-ring"]),
        "wire": st.sampled_from([None, torch.bfloat16, torch.float32]),
        "seed": st.integers(0, 99),
    }
)


def steps(
    name: str, n: int, d: int, tau: int, graph: str, wire: torch.dtype | None, seed: int
) -> Iterator[tuple[Plain, np.ndarray, np.ndarray]]:
    """After every gradient: the runner, the x it was taken at, the gradient."""
    tau = 1 if name.startswith("dsgd") else tau
    problem = paper_equations.Quadratics(n, d, seed=seed, noise=0.5)
    transport = StackedTransport(topology.from_name(graph, n), wire=wire)
    x = torch.from_numpy(problem.x0.copy())
    runner = Plain(x, algorithms.get(name)(tau=tau), transport, ALPHA)
    runner.start()
    for t in range(3 * tau + 1):
        before = x.numpy().copy()
        g = problem.grad(before, t)
        runner.advance(torch.from_numpy(g))
        yield runner, before, g


@pytest.mark.parametrize("name", MEAN_FOLLOWS_SGD)
@settings(max_examples=15)
@given(case=cases)
def test_the_mean_model_follows_plain_sgd(name: str, case: dict) -> None:
    for runner, before, g in steps(name, **case):
        expected = before.mean(axis=0) - ALPHA * g.mean(axis=0)
        np.testing.assert_allclose(runner.x.numpy().mean(axis=0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NOT_PLAIN_SGD)
def test_the_others_do_not(name: str) -> None:
    case = {"n": 4, "d": 3, "tau": 2, "graph": "ring", "wire": None, "seed": 0}
    gaps = [
        np.abs(runner.x.numpy().mean(axis=0) - before.mean(axis=0) + ALPHA * g.mean(axis=0)).max()
        for runner, before, g in steps(name, **case)
    ]
    assert max(gaps) > 1e-3


@pytest.mark.parametrize(("name", "correction"), [("kgt", "c"), ("led", "y"), ("oled", "y")])
@settings(max_examples=15)
@given(case=cases)
def test_corrections_sum_to_zero(name: str, correction: str, case: dict) -> None:
    size = 0.0
    for runner, _, _ in steps(name, **case):
        y = getattr(runner.algorithm, correction).numpy()
        size = max(size, np.abs(y).max())
        np.testing.assert_allclose(y.sum(axis=0), 0, atol=1e-11)
    assert case["n"] == 1 or size > 1e-3  # there was something to cancel


@pytest.mark.parametrize("name", ["lugt", "olgt"])
@settings(max_examples=15)
@given(case=cases)
def test_tracking_variables_sum_to_the_latest_gradients(name: str, case: dict) -> None:
    for runner, _, g in steps(name, **case):
        y = runner.algorithm.y.numpy()  # in units of a gradient
        np.testing.assert_allclose(y.sum(axis=0), g.sum(axis=0), rtol=0, atol=1e-11)


@settings(max_examples=15)
@given(case=cases)
def test_the_anchor_is_one_for_all_agents(case: dict) -> None:
    for runner, _, _ in steps("overlap_local_sgd", **case):
        for y in (runner.algorithm.z, runner.algorithm.v):
            assert torch.equal(y, y[:1].expand_as(y))


@settings(max_examples=15)
@given(case=cases)
def test_cocod_is_oldsgd_on_the_complete_graph(case: dict) -> None:
    case |= {"graph": "complete", "wire": None}
    ours = [runner.x.numpy().copy() for runner, _, _ in steps("cocod", **case)]
    theirs = [runner.x.numpy().copy() for runner, _, _ in steps("oldsgd", **case)]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def rounds_of(name: str, x0: np.ndarray, tau: int, **options: float) -> np.ndarray:
    problem = paper_equations.Quadratics(*x0.shape, seed=3, noise=0.5)
    algorithm = algorithms.get(name)(tau=tau, **options)
    return trajectory(algorithm, "ring", x0, problem.grad, ALPHA, 8, batched=True).X


@pytest.mark.parametrize("tau", [1, 4])
@pytest.mark.parametrize(
    ("name", "options", "other"),
    [
        ("diloco", {"outer": 1.0, "outer_momentum": 0.0}, "lsgd"),
        ("noloco", {"outer": 1.0, "outer_momentum": 0.0}, "ldsgd"),
        ("moldsgd", {"outer": 1.0, "outer_momentum": 0.0}, "oldsgd"),
        ("dga", {}, "cocod"),
    ],
)
def test_rivals_that_are_another_method(
    name: str, options: dict[str, float], other: str, tau: int
) -> None:
    x0 = np.random.default_rng(1).standard_normal((6, 5))
    ours, theirs = rounds_of(name, x0, tau, **options), rounds_of(other, x0, tau)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    plain = rounds_of("ldsgd" if other == "oldsgd" else "oldsgd", x0, tau)
    assert np.abs(ours - plain).max() > 1e-3


@pytest.mark.parametrize(("tau", "P"), [(1, 1), (4, 1), (5, 3)])
def test_the_mean_of_moldsgd_takes_the_steps_of_diloco(tau: int, P: int) -> None:
    """Of gradients that do not depend on x, so that both have the same ones."""
    x0 = np.random.default_rng(1).standard_normal((5, 100))
    common = np.broadcast_to(x0.mean(axis=0), x0.shape).copy()  # where DiLoCo's agents are

    def grad(X: np.ndarray, t: int) -> np.ndarray:
        return np.random.default_rng(t).standard_normal(X.shape)

    def mean(name: str, start: np.ndarray, **options: int) -> np.ndarray:
        algorithm = algorithms.get(name)(tau=tau, **options)
        return trajectory(algorithm, "ring", start, grad, ALPHA, 8, batched=True).X.mean(axis=1)

    ours = mean("moldsgd", x0, fragments=P)
    np.testing.assert_allclose(ours, mean("diloco", common), rtol=0, atol=1e-12)
    assert np.abs(ours - mean("oldsgd", x0, fragments=P)).max() > 1e-2


def test_agents_of_eager_diloco_stay_together() -> None:
    """Their outer gradients differ by what changed since the last round, so it does not add up."""
    n, tau, eta = 6, 5, 0.7
    b, x0 = np.random.default_rng(0).standard_normal((2, n, 4))  # they start apart
    algorithm = algorithms.get("eager_diloco")(tau=tau, outer=eta, outer_momentum=0.0)
    ours = trajectory(algorithm, "ring", x0, lambda X, k: b, ALPHA, 6, batched=True)
    apart = -eta * ALPHA * tau * (b - b.mean(axis=0)) / n
    for X, mean in zip(ours.X[1:], ours.mean[1:], strict=True):
        np.testing.assert_allclose(X - mean, apart, rtol=0, atol=1e-12)
