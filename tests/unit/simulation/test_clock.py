"""Virtual time: round times out of the schedules, and a literal event-by-event account."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import LDSGD, LSGD, OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.trajectory import trajectory
from support.small_problems import random_topologies

TAUS, CS = (1, 3, 5, 10), (0.0, 0.5, 1.0, 5.0, 12.5)


def times(algorithm, graph, n, c, rounds=6, **options):
    def zero(X, k):
        return np.zeros_like(X)

    x0 = np.zeros((n, 2))
    return trajectory(algorithm, graph, x0, zero, 0.1, rounds, c, batched=True, **options)


@pytest.mark.parametrize("n, graph", [(2, "ring"), (9, "ring"), (9, "torus"), (4, "one-peer-ring")])
def test_round_times_come_out_of_the_schedules(n, graph):
    for tau, c in itertools.product(TAUS, CS):
        for algorithm, expected in (
            (OLDSGD(tau=tau), max(tau, c)),
            (LDSGD(tau=tau), tau + c),
            (LSGD(tau=tau), tau + 2 * (n - 1) / n * c),
        ):
            result = times(algorithm, graph, n, c)
            np.testing.assert_allclose(result.time, expected * np.arange(7), rtol=1e-12)
            np.testing.assert_allclose(result.wait, (expected - tau) * np.arange(7), atol=1e-9)


def test_alone_there_is_nothing_to_wait_for():
    for algorithm in (OLDSGD(tau=3), LDSGD(tau=3), LSGD(tau=3)):
        result = times(algorithm, "ring", 1, c=50.0)
        np.testing.assert_array_equal(result.time, 3 * np.arange(7))
        assert not result.wait.any()


def literal(graph, tau, rounds, c, speed, degree_aware):
    """OLDSGD message by message: one card per agent, which sends one thing at a time."""
    n = graph.n
    t, card = [0.0] * n, [0.0] * n
    for r in range(rounds):
        arrived = {}
        for i in range(n):
            at = start = max(t[i], card[i])
            for j, _ in graph.neighbours(i, r):
                at = at + c[i, j] if degree_aware else start + c[i, j]
                arrived[i, j] = at
                card[i] = max(card[i], at)
        for i in range(n):
            sent = [at for (source, _), at in arrived.items() if source == i]
            received = [at for (_, target), at in arrived.items() if target == i]
            t[i] = max([t[i] + tau / speed[i], *sent, *received])
    return t


@settings(max_examples=40)
@given(
    n=st.integers(1, 7),
    tau=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    degree_aware=st.booleans(),
    varying=st.booleans(),
)
def test_links_speeds_and_degrees_are_charged_message_by_message(
    n, tau, seed, degree_aware, varying
):
    rng = np.random.default_rng(seed)
    graph = next(random_topologies(n, seed))
    if varying and n > 2:
        graph = topology.from_name("one-peer-ring", n)
    c, speed = rng.uniform(0, 4, (n, n)), rng.uniform(0.3, 2, n)
    clock = Clock(n, c, speed=speed, degree_aware=degree_aware)
    runner = Plain(torch.zeros(n, 1), OLDSGD(tau=tau), StackedTransport(graph, clock), 0.1)
    boundaries = []
    runner.on_round.append(lambda r: boundaries.append(clock.t.copy()))
    runner.start()
    for _ in range(4 * tau):
        runner.advance(torch.zeros(n, 1))
    for r, t in enumerate(boundaries):
        np.testing.assert_allclose(t, literal(graph, tau, r, c, speed, degree_aware), rtol=1e-12)


def test_degree_aware_cost_counts_neighbours():
    assert times(OLDSGD(tau=1), "complete", 5, 2.0).time[-1] == 6 * 2
    assert times(OLDSGD(tau=1), "complete", 5, 2.0, degree_aware=True).time[-1] == 6 * 2 * 4


def test_an_all_reduce_goes_around_the_ring_and_takes_no_other_link():
    c = np.ones((9, 9))
    c[0, 4], c[5, 5] = 100.0, 50.0
    assert times(LSGD(tau=5), "ring", 9, c, rounds=1).time[-1] == pytest.approx(5 + 16 / 9)
    c[3, 4] = 2.0
    assert times(LSGD(tau=5), "ring", 9, c, rounds=1).time[-1] == pytest.approx(5 + 32 / 9)


def test_one_slow_agent_slows_its_neighbours_only_as_far_as_they_wait():
    speed = np.ones(8)
    speed[3] = 0.25
    clock = Clock(8, 0.0, speed=speed)
    graph = topology.from_name("ring", 8)
    runner = Plain(torch.zeros(8, 1), OLDSGD(tau=1), StackedTransport(graph, clock), 0.1)
    runner.start()
    runner.advance(torch.zeros(8, 1))
    # After one round nobody has yet needed what agent 3 sends next.
    assert clock.t.tolist() == [1, 1, 1, 4, 1, 1, 1, 1]
    runner.advance(torch.zeros(8, 1))
    assert clock.t.tolist() == [2, 2, 4, 8, 4, 2, 2, 2]


def test_jitter_is_seeded_and_relative():
    def draws(seed, jitter=0.3, n=2000):
        clock = Clock(n, 1.0, speed=np.full(n, 0.5), jitter=jitter, seed=seed)
        clock.compute()
        return clock.t

    assert np.array_equal(draws(1), draws(1))
    assert not np.array_equal(draws(1), draws(2))
    assert (draws(1, jitter=2.0) >= 0).all()
    assert draws(1).mean() == pytest.approx(2.0, rel=0.03)
    assert draws(1).std() == pytest.approx(0.3 * 2.0, rel=0.06)


def test_a_saved_clock_goes_on_where_it_was():
    graph = topology.from_name("ring", 5)
    whole = Clock(5, 1.7, jitter=0.5, seed=3)
    whole.compute()
    whole.wait(whole.post(graph, 0)[1])
    resumed = Clock(5, 1.7, jitter=0.5, seed=99)
    resumed.load_state_dict(whole.state_dict())
    for clock in (whole, resumed):
        clock.compute()
        clock.wait(clock.post(graph, 1)[1])
    assert np.array_equal(whole.t, resumed.t) and np.array_equal(whole.waited, resumed.waited)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"c": -1.0}, "at least 0"),
        ({"c": float("nan")}, "finite"),
        ({"c": np.ones((2, 3))}, "c must be a number or"),
        ({"speed": np.array([1.0, 0.0, 1.0])}, "positive"),
        ({"speed": np.ones(2)}, "one per agent"),
        ({"jitter": -0.1}, "jitter"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Clock(3, **options)
