"""The disagreement of agents against the literal equations, run in numpy with zero curvature."""

import itertools

import numpy as np
import pytest

from hpc_oldsgd import theory
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.theory import Flights
from hpc_oldsgd.theory.varying import varying
from hpc_oldsgd.topology import from_matrix, from_name

GRAPHS = {
    "ring": from_name("ring", 9),
    "torus": from_name("torus", 12),
    "exponential": from_name("exponential", 8),
}
TAU_AND_P = sorted({(tau, P) for tau in (1, 3, 5, 7) for P in {1, 3, 5, tau} if tau >= P})


def agents(graph, tau, P, alpha, sigma, zeta, gamma=0.0, *, d, rounds, burn_in, ldsgd=False):
    """(1/n) sum_i ||x_i - xbar||^2 at the boundaries and at all iterations, of the equations.

    One step at a time, by the text: fragment k leaves after step floor(k tau / P) of the round and
    is mixed after step floor((k+1) tau / P). Each fragment has d / P columns, so d is shared
    evenly when P divides it.
    """
    random = np.random.default_rng((tau, P, round(100 * gamma)))
    n = graph.n
    x, y = np.zeros((2, n, d))
    columns = [slice(k * d // P, (k + 1) * d // P) for k in range(P)]
    boundary, steps = [], []
    for r in range(burn_in + rounds):
        sent, W = {}, graph.matrix(r)
        for step in range(tau):
            for k in range(P):
                if step == k * tau // P:
                    sent[k] = x[:, columns[k]].copy()
            if r >= burn_in:
                now = ((x - x.mean(0)) ** 2).sum() / n
                steps.append(now)
                if step == 0:
                    boundary.append(now)
            g = zeta + sigma / np.sqrt(d) * random.standard_normal((n, d))
            x = x - alpha * g - y / tau
            if ldsgd and step == tau - 1:
                x = W @ x
            for k in range(P):
                if not ldsgd and step + 1 == (k + 1) * tau // P:
                    e = W @ sent[k] - sent[k]
                    x[:, columns[k]] += e
                    y[:, columns[k]] -= gamma * e
    return np.mean(boundary), np.mean(steps)


def heterogeneity(n, d, size):
    """Rows of the same length in random directions, each column of the same spread."""
    random = np.random.default_rng(n)
    zeta = random.standard_normal((n, d))
    return size * zeta / np.sqrt(((zeta - zeta.mean(0)) ** 2).sum() / n)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("tau, P", TAU_AND_P)
@pytest.mark.parametrize("sigma, zeta", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_oldsgd_in_fragments(name, tau, P, sigma, zeta):
    """d = 1050 columns of 60 rounds: the standard error of the noise is below 1%."""
    graph, d = GRAPHS[name], 1050
    gradients = heterogeneity(graph.n, d, zeta)
    rounds = 60 if sigma else 1
    seen = agents(graph, tau, P, 0.1, sigma, gradients, d=d, rounds=rounds, burn_in=100)
    flights = Flights.oldsgd(tau, P)
    said = theory.disagreement(graph, flights, alpha=0.1, sigma=sigma, zeta=gradients)
    assert seen == pytest.approx(tuple(said), rel=0.05 if sigma else 0.02)
    by_norm = theory.disagreement(graph, flights, alpha=0.1, sigma=sigma, zeta=zeta)
    assert seen == pytest.approx(tuple(by_norm), rel=0.1)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("tau", [1, 3, 5, 7])
def test_ldsgd(name, tau):
    graph, d = GRAPHS[name], 1000
    zeta = heterogeneity(graph.n, d, 0.3)
    seen = agents(graph, tau, 1, 0.1, 1.0, zeta, d=d, rounds=60, burn_in=100, ldsgd=True)
    said = theory.disagreement(graph, Flights.ldsgd(tau), alpha=0.1, sigma=1, zeta=zeta)
    assert seen == pytest.approx(tuple(said), rel=0.05)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("tau, P, gamma", [(1, 1, 0.1), (5, 1, 0.3), (5, 5, 0.3), (7, 3, 0.6)])
def test_xoldsgd(name, tau, P, gamma):
    """Constant heterogeneity is corrected to nothing; what is left is the noise."""
    graph, d = GRAPHS[name], 1050
    zeta = heterogeneity(graph.n, d, 1.0)
    flights = Flights.oldsgd(tau, P)
    seen = agents(graph, tau, P, 0.1, 1.0, zeta, gamma, d=d, rounds=200, burn_in=300)
    said = theory.disagreement(graph, flights, alpha=0.1, sigma=1, zeta=zeta, gamma=gamma)
    assert seen == pytest.approx(tuple(said), rel=0.05)
    quiet = agents(graph, tau, P, 0.1, 0.0, zeta, gamma, d=d, rounds=1, burn_in=400)
    assert max(quiet) < 1e-6


def test_by_hand():
    """Without correction: what each step of age adds, per mode."""
    lam = np.array([-0.5, 0.0, 0.8])
    for tau in (1, 3, 5, 7):
        old, waits = theory.noise(lam, Flights.oldsgd(tau)), theory.noise(lam, Flights.ldsgd(tau))
        assert old.boundary == pytest.approx(tau / (1 - lam**2))
        assert waits.boundary == pytest.approx(tau * lam**2 / (1 - lam**2))
        for P in range(1, tau + 1):
            flights = Flights.oldsgd(tau, P)
            assert theory.noise(lam, flights).mean - waits.mean == pytest.approx(tau / P)
            late = tau * lam**2 / (1 - lam**2) + tau - flights.leaves.mean()
            assert theory.noise(lam, flights).boundary == pytest.approx(late)
            age, b = flights.ages, lam[:, None] * tau / (1 - lam[:, None])
            late = (2 * b * age + age * (age - 1) + tau * age).mean(axis=1)
            extra = theory.drift(lam, flights).mean - theory.drift(lam, Flights.ldsgd(tau)).mean
            assert extra == pytest.approx(late)


def test_ring_of_nine():
    """The figures of docs/theory.md: sums over the modes of the two factors of a round's drift."""
    lam = theory.modes(GRAPHS["ring"])
    assert (1 / (1 - lam**2)).sum() == pytest.approx(13.6, abs=0.05)
    assert (lam**2 / (1 - lam**2)).sum() == pytest.approx(5.6, abs=0.05)


def test_flights():
    """Fragments fly one after another and fill the round, also where P does not divide tau."""
    for tau, P in itertools.combinations_with_replacement(range(1, 12), 2):
        tau, P = max(tau, P), min(tau, P)
        flights = Flights.oldsgd(tau, P)
        lands = flights.leaves + flights.ages
        assert lands.tolist() == [*flights.leaves[1:], tau]
        assert flights.ages.min() >= 1 and len(flights.shares) <= 2


def test_limits():
    """gamma = 0 is OLDSGD, and gamma -> 0 tends to it under noise; P = 1 is OLDSGD."""
    lam = theory.modes(GRAPHS["torus"])
    for P in (1, 3, 5):
        flights = Flights.oldsgd(5, P)
        for at_zero, near in zip(
            theory.noise(lam, flights), theory.noise(lam, flights, 1e-9), strict=True
        ):
            assert near == pytest.approx(at_zero, rel=1e-6)
        assert (theory.drift(lam, flights, 1e-9).mean == 0).all()
        assert (theory.drift(lam, flights, 0.0).mean > 0).all()
    assert np.isinf(theory.noise(lam, Flights.oldsgd(5), 1.0).mean).all()


def test_one_agent_never_disagrees():
    assert theory.disagreement(from_matrix(np.ones((1, 1))), Flights.oldsgd(5)) == (0, 0)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: Flights.oldsgd(5, 6), "fragments must be from 1 to tau, which is 5, not 6"),
        (lambda: Flights.oldsgd(5, 0), "fragments must be"),
        (lambda: Flights.oldsgd(0), "tau must be at least 1"),
        (lambda: theory.modes(from_name("one-peer-ring", 8)), "changes every round"),
        (lambda: theory.modes(from_name("ring", 2001)), "at most 2000"),
        (
            lambda: theory.disagreement(GRAPHS["ring"], Flights.oldsgd(5), zeta=np.ones((3, 2))),
            "a row for each of 9 agents",
        ),
    ],
)
def test_errors(make, reason):
    with pytest.raises(UserError, match=reason):
        make()


@pytest.mark.parametrize("tau, P", [(1, 1), (5, 1), (5, 3), (5, 5), (8, 2)])
def test_the_matrices_of_a_period_say_what_modes_say(tau, P):
    """A static graph as one that changes to itself."""
    kinds = Flights.oldsgd(tau, P), Flights.ldsgd(tau)
    for flights, graph in itertools.product(kinds, GRAPHS.values()):
        for zeta in (0.0, 1.0, heterogeneity(graph.n, 3, 1.0)):
            said = theory.disagreement(graph, flights, sigma=0.7, zeta=zeta)
            assert varying(graph, flights, 0.7, zeta) == pytest.approx(tuple(said), rel=1e-9)


@pytest.mark.parametrize("tau, P", [(1, 1), (5, 1), (5, 3)])
def test_a_graph_that_changes(tau, P):
    graph, d = from_name("one-peer-exponential", 6), 1050
    zeta = heterogeneity(graph.n, d, 0.5)
    seen = agents(graph, tau, P, 0.1, 1.0, zeta, d=d, rounds=60, burn_in=60)
    said = theory.disagreement(graph, Flights.oldsgd(tau, P), alpha=0.1, sigma=1, zeta=zeta)
    assert graph.period > 1 and seen == pytest.approx(tuple(said), rel=0.05)
