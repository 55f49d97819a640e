"""`trajectory`: the researcher's entry, against the paper's equations written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import LDSGD, LSGD, OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.simulation.trajectory import trajectory
from support.small_problems import literal_oldsgd, quadratic


def start(n, d=7, dtype=np.float64):
    return np.random.default_rng(n).normal(size=(n, d)).astype(dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("graph", ["ring", "complete", "one-peer-ring"])
@pytest.mark.parametrize("form", ["delta", "gradient"])
def test_oldsgd_is_the_papers_recursion(n, graph, form):
    W = topology.from_name(graph, n)
    grad = quadratic(n, 7)
    for tau in (1, 2, 5):
        run = trajectory(OLDSGD(tau=tau, form=form), W, start(n), grad, 0.1, 4)
        x = literal_oldsgd(start(n), W.matrix, grad, 0.1, tau, 4 * tau)
        np.testing.assert_allclose(run.X, x[::tau], rtol=1e-11, atol=1e-12)


def test_ldsgd_and_lsgd_are_theirs():
    n, tau = 5, 3
    W = topology.from_name("ring", n)
    grad = quadratic(n, 7)
    for algorithm, mix in ((LDSGD(tau=tau), W.W), (LSGD(tau=tau), np.full((n, n), 1 / n))):
        run = trajectory(algorithm, W, start(n), grad, 0.1, 4)
        x, k = start(n), 0
        for r in range(4):
            np.testing.assert_allclose(run.X[r], x, rtol=1e-11, atol=1e-12)
            for _ in range(tau):
                x = x - 0.1 * np.stack([grad(i, x[i], k) for i in range(n)])
                k += 1
            x = mix @ x


def test_batched_is_the_same_bit_for_bit():
    n = 6
    grad = quadratic(n, 7)
    one = trajectory("oldsgd", "ring", start(n), grad, 0.1, 5)
    all_at_once = trajectory(
        "oldsgd", "ring", start(n), lambda X, k: np.stack([grad(i, X[i], k) for i in range(n)]),
        0.1, 5, batched=True,
    )  # fmt: skip
    assert np.array_equal(one.X, all_at_once.X)


def test_x0_is_left_alone_and_kept_in_its_type():
    for dtype in (np.float32, np.float64):
        x0 = start(4, dtype=dtype)
        before = x0.copy()
        run = trajectory("oldsgd", "ring", x0, quadratic(4, 7, dtype), 0.1, 3)
        assert np.array_equal(x0, before)
        assert run.X.dtype == dtype and run.X.shape == (4, 4, 7)
        assert run.time.shape == run.wait.shape == (4,)
        assert np.array_equal(run.X[0], x0)
        assert run.mean.shape == (4, 7)


def test_no_rounds_is_the_start():
    run = trajectory("oldsgd", "ring", start(3), quadratic(3, 7), 0.1, 0)
    assert run.X.shape == (1, 3, 7) and run.time.tolist() == [0.0]


def test_draws_are_counted_per_agent():
    drawn = []
    trajectory(OLDSGD(tau=2), "ring", start(3), lambda i, x, k: drawn.append((i, k)) or x, 0.1, 2)
    assert drawn == [(i, k) for k in range(4) for i in range(3)]


def test_a_thousand_agents():
    """The mean of 1,024 agents on their own quadratics finds the common optimum."""
    n, d = 1024, 50
    centre = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    x0 = np.zeros((n, d), np.float32)
    run = trajectory(
        OLDSGD(tau=5), "exponential", x0, lambda X, k: X - centre, 0.1, 60, batched=True
    )
    np.testing.assert_allclose(run.mean[-1], centre.mean(0), atol=1e-4)
    assert run.time[-1] == 60 * 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x0": np.zeros(3)}, "must be an"),
        ({"x0": np.zeros((3, 2), np.int64)}, "float32 or float64"),
        ({"x0": np.full((3, 2), np.nan)}, "not finite"),
        ({"rounds": -1}, "rounds"),
        ({"rounds": 1.5}, "whole number"),
        ({"alpha": np.nan}, "alpha must be finite"),
        ({"wire": "fp8"}, "no wire type"),
        ({"topology": topology.from_name("ring", 4)}, "3 rows"),
        ({"algorithm": "oldsdg"}, "did you mean oldsgd"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(change, message):
    good = {
        "algorithm": "oldsgd", "topology": "ring", "x0": np.zeros((3, 2)),
        "grad": lambda i, x, k: x, "alpha": 0.1, "rounds": 1,
    }  # fmt: skip
    with pytest.raises(UserError, match=message):
        trajectory(**{**good, **change})


def test_the_wire_has_a_name_and_rounds_may_be_a_float():
    x0, grad = start(3, dtype=np.float32), quadratic(3, 7, np.float32)
    named = trajectory("oldsgd", "ring", x0, grad, 0.1, 4.0, wire="bf16")
    typed = trajectory("oldsgd", "ring", x0, grad, 0.1, 4, wire=torch.bfloat16)
    assert (named.X == typed.X).all()
    assert (named.X != trajectory("oldsgd", "ring", x0, grad, 0.1, 4).X).any()
