"""x in fragments: the equations, the clock, the two forms, and what is kept exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import MOLDSGD, OLDSGD, XOLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.simulation.trajectory import trajectory
from hpc_oldsgd.study import table1
from support import paper_equations

N, D, ALPHA, ROUNDS = 9, 5 * paper_equations.LINE + 7, 0.05, 6
CASES = [(1, 1), (3, 1), (3, 2), (3, 3), (5, 3), (5, 5), (7, 3), (7, 5), (7, 7)]


PROBLEM = paper_equations.Quadratics(N, D, seed=1, noise=0.3)


def run(algorithm: algorithms.Algorithm, graph: str = "ring") -> np.ndarray:
    network = topology.from_name(graph, N)
    found = trajectory(algorithm, network, PROBLEM.x0, PROBLEM.grad, ALPHA, ROUNDS, batched=True)
    return found.X


@pytest.mark.parametrize("graph", ["ring", "torus", "one-peer-ring"])
@pytest.mark.parametrize(("tau", "P"), CASES)
def test_equals_the_equations(tau: int, P: int, graph: str) -> None:
    W = topology.from_name(graph, N).matrix
    for gamma in (0.0, 0.1, 0.6):
        expected = paper_equations.xoldsgd(
            PROBLEM.x0, PROBLEM.grad, W, ALPHA, tau, ROUNDS, P, gamma
        )
        ours = run(XOLDSGD(tau=tau, fragments=P, gamma=gamma), graph)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)
        if gamma == 0:
            for form in ("delta", "gradient"):
                ours = run(OLDSGD(tau=tau, fragments=P, form=form), graph)  # type: ignore[arg-type]
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("graph", ["ring", "one-peer-ring"])
@pytest.mark.parametrize(("tau", "P"), CASES)
def test_momentum_between_rounds_of_fragments(tau: int, P: int, graph: str) -> None:
    W = topology.from_name(graph, N).matrix
    expected = paper_equations.moldsgd(
        PROBLEM.x0, PROBLEM.grad, W, ALPHA, tau, ROUNDS, 0.6, 0.8, fragments=P
    )
    ours = run(MOLDSGD(tau=tau, fragments=P, outer=0.6, outer_momentum=0.8), graph)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["delta", "gradient"])
def test_one_fragment_is_the_papers_method_bit_for_bit(form: Any) -> None:
    assert (run(OLDSGD(tau=5, fragments=1, form=form)) == run(OLDSGD(tau=5, form=form))).all()


def test_no_correction_is_oldsgd_and_a_full_one_is_oled() -> None:
    assert (run(XOLDSGD(tau=5, fragments=3, gamma=0.0)) == run(OLDSGD(tau=5, fragments=3))).all()
    nearly = run(XOLDSGD(tau=5, gamma=1 - 1e-12))
    np.testing.assert_allclose(nearly, run(algorithms.get("oled")(tau=5)), rtol=0, atol=1e-8)


@pytest.mark.parametrize("d", [1, 7, 33, 64])
def test_a_model_of_fewer_lines_than_fragments(d: int) -> None:
    problem = paper_equations.Quadratics(4, d, seed=2)
    W = topology.from_name("ring", 4)
    arguments = (problem.x0, problem.grad, W.matrix, ALPHA, 5, 4, 5, 0.1)
    ours = trajectory(
        XOLDSGD(tau=5, fragments=5), W, problem.x0, problem.grad, ALPHA, 4, batched=True
    )
    np.testing.assert_allclose(ours.X, paper_equations.xoldsgd(*arguments), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("tau", "P"), [(5, 5), (6, 3), (6, 2), (20, 20), (4, 4)])
def test_a_round_takes_max_tau_c(tau: int, P: int) -> None:
    """From the clock alone: each fragment is charged by its size."""
    for c in (0.0, 0.5, 1.0, 5.0, 7.5, 40.0):
        for algorithm in (OLDSGD(tau=tau, fragments=P), XOLDSGD(tau=tau, fragments=P)):
            assert table1.round_time(algorithm, "ring", 9, c) == pytest.approx(max(tau, c))


@pytest.mark.parametrize("wire", [None, "fp32", "bf16"])
def test_the_mean_follows_plain_sgd_at_every_boundary(wire: str | None) -> None:
    b = np.random.default_rng(0).standard_normal((N, D))
    algorithm = XOLDSGD(tau=7, fragments=5)
    found = trajectory(
        algorithm, "ring", b * 0, lambda X, k: X * 0 + b, ALPHA, 5, batched=True, wire=wire
    )
    steps = 7 * np.arange(6)[:, None]
    np.testing.assert_allclose(found.mean, -ALPHA * steps * b.mean(axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("tau", "P"), [(1, 1), (5, 1), (5, 5), (40, 5)])
def test_xoldsgd_finds_the_exact_minimiser_where_oldsgd_stays_away(tau: int, P: int) -> None:
    problem = paper_equations.Quadratics(5, 50, seed=3)
    alpha = 0.2 / tau

    def end(algorithm: algorithms.Algorithm, rounds: int) -> float:
        found = trajectory(algorithm, "ring", problem.x0, problem.grad, alpha, rounds, batched=True)
        return problem.error(found.X[-1])

    assert end(XOLDSGD(tau=tau, fragments=P), 450) < 1e-10
    assert end(OLDSGD(tau=tau, fragments=P), 100) > 1e-2


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (OLDSGD, {"tau": 3, "fragments": 4}, "fragments must be a whole number from 1 to tau"),
        (OLDSGD, {"tau": 3, "fragments": 0}, "fragments must be a whole number from 1 to tau"),
        (XOLDSGD, {"gamma": 1.0}, "gamma must be at least 0 and below 1"),
        (XOLDSGD, {"gamma": -0.1}, "gamma must be at least 0 and below 1"),
        (XOLDSGD, {"gamma": float("nan")}, "gamma must be at least 0 and below 1"),
    ],
)
def test_refused(kind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        kind(**options)


@pytest.mark.parametrize(("outer", "momentum"), [(0.7, 0.9), (0.7, 0.0), (1.2, 0.9), (1.0, 0.5)])
def test_an_outer_step_that_is_not_stable_on_the_graph_is_refused(
    outer: float, momentum: float
) -> None:
    """Two agents that exchange nearly all: the limit is where the simulation begins to grow."""
    x0, found = np.array([[1.0], [-1.0]]), set()
    for least in (-0.99, -0.95, -0.93, -0.7, -0.4, 0.0):
        w = (1 - least) / 2
        W = np.array([[1 - w, w], [w, 1 - w]])
        algorithm = MOLDSGD(tau=2, outer=outer, outer_momentum=momentum)
        try:
            algorithm.check(topology.from_matrix(W))
            refused = False
        except UserError as error:
            refused = "is not stable" in str(error)
        with np.errstate(over="ignore", invalid="ignore"):
            X = paper_equations.moldsgd(
                x0, lambda X, t: np.zeros_like(X), lambda r, W=W: W, 0.1, 2, 3000, outer, momentum
            )
        assert refused == (not np.abs(X[-1]).max() < 1), least
        found.add(refused)
    assert found == ({True, False} if momentum or outer > 1 else {False})


@pytest.mark.parametrize(("tau", "P"), [(5, 5), (15, 15), (5, 3), (5, 1)])
def test_a_gamma_that_is_not_stable_on_the_graph_is_refused(tau: int, P: int) -> None:
    """The 4 x 4 torus has a lambda of -0.6. The limit is where the simulation begins to grow."""
    graph = topology.from_name("torus:4x4", 16)
    W = graph.matrix()
    x0 = np.random.default_rng(0).standard_normal((16, P * paper_equations.LINE))

    def grows(gamma: float) -> bool:
        rounds = 400
        X = paper_equations.xoldsgd(x0, lambda X, t: 0 * X, lambda r: W, 0.1, tau, rounds, P, gamma)
        return bool(np.abs(X[-1] - X[-1].mean(axis=0)).max() > 1e-3)

    def refused(gamma: float) -> bool:
        try:
            XOLDSGD(tau=tau, fragments=P, gamma=gamma).check(graph)
        except UserError as error:
            assert "take gamma below" in str(error)
            return True
        return False

    for gamma in (0.1, 0.5, 0.6, 0.8, 0.9):
        assert refused(gamma) == grows(gamma), gamma
