"""--late reuse in virtual time: who is late, what is mixed then, and the mean that stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import KGT, LDSGD, LSGD, OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.trajectory import trajectory
from hpc_oldsgd.transport.late import Edges, Late, decide
from hpc_oldsgd.transport.narrow import Narrow
from support.small_problems import quadratic, random_topologies, rows


def event_by_event(a: float, b: float, ta: float, tb: float, wait: float, must: bool):
    """One edge. a (b): when the other's message is at end 0 (1); ta, tb: when they come to the end
    of their rounds. Whether the edge is used, and when each end goes on."""
    events = [(a, 0, 0, "arrives"), (b, 0, 1, "arrives")]
    events += [] if must else [(ta + wait, 1, 0, "gives up"), (tb + wait, 1, 1, "gives up")]
    said: list[tuple[bool, float] | None] = [None, None]
    done: list[float | None] = [None, None]
    for at, _, end, what in sorted(events):
        other = said[1 - end]
        refused = other is not None and not other[0]
        if said[end] is None:
            said[end] = (what == "arrives" and not refused, at)
    for end, t in enumerate((ta, tb)):
        own, other = said[end], said[1 - end]
        assert own is not None and other is not None
        if own[0]:  # our word is given: the other's is waited for
            done[end] = max(t, own[1], other[1]) if other[0] else max(t, other[1])
        else:  # we said no: when we did, or when we heard it at the end of our round
            heard = max(t, other[1]) if not other[0] else np.inf
            done[end] = max(t, min(max(own[1], t), heard))
    return all(s is not None and s[0] for s in said), done


@settings(max_examples=300)
@given(
    times=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    wait=st.sampled_from([0.0, 0.5, 2.5, 20.5]),
    must=st.booleans(),
)
def test_an_edge_is_decided_as_its_events_come(times, wait, must):
    a, b, ta, tb = map(float, times)
    edges = Edges.of(np.array([0, 1, 2]), np.array([1, 0]))
    used, ready = decide(edges, np.array([ta, tb]), np.array([b, a]), wait, np.array([must, must]))
    expected, leave = event_by_event(a, b, ta, tb, wait, must)
    assert used.tolist() == [expected, expected]
    assert ready.tolist() == leave


def run(algorithm, graph, x0, grad, rounds, late, *, wire=None, clock: dict[str, Any], alpha=0.05):
    """X at the boundaries, the W that was used in each exchange, times, left out."""
    n = len(x0)
    transport = StackedTransport(graph, Clock(n, **clock), wire, late)
    X = torch.from_numpy(x0.copy())
    runner = Plain(X, algorithm, transport, alpha)
    at, used, t = [], [], []
    exchange = transport.exchange
    flights = []

    def watched(x, round, share):
        flights.append((round, exchange(x, round, share)))
        return flights[-1][1]

    transport.exchange = watched  # type: ignore[method-assign]

    def boundary(r):
        at.append(X.numpy().copy())
        t.append(transport.clock.t.copy())
        if r.r == rounds:
            r.stop()

    runner.on_round.append(boundary)
    runner.start()
    k = 0
    while not runner.finished:
        G = np.stack([grad(i, X[i].numpy(), k) for i in range(n)]).astype(x0.dtype)
        k += 1
        runner.advance(torch.from_numpy(G))
    for round, flight in flights[: len(flights) - (len(flights) > rounds)]:
        W = graph.matrix(round).copy()
        e = transport.edges(round)
        for a, b, yes in zip(e.owner, e.neighbour, getattr(flight, "used", []), strict=False):
            if not yes:
                W[a, a] += W[a, b]
                W[a, b] = 0.0
        used.append(W)
    return np.stack(at), used, np.stack(t)


@settings(max_examples=60)
@given(
    n=st.integers(1, 9),
    tau=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    wait=st.sampled_from([0.0, 0.3, 2.0]),
    staleness=st.integers(1, 3),
    form=st.sampled_from(["delta", "gradient"]),
    wire=st.sampled_from([None, torch.bfloat16, Narrow(8), Narrow(4)]),
)
def test_the_mean_follows_plain_sgd_whoever_is_late(n, tau, seed, wait, staleness, form, wire):
    """The identity of the paper, round by round, and the literal update with the W that was."""
    rng = np.random.default_rng(seed)
    graph = next(random_topologies(n, seed))
    if seed % 3 == 0 and n > 2:
        graph = topology.from_name("one-peer-ring", n)
    wire = None if form == "gradient" else wire
    rounds, alpha, d = 8, 0.05, 5
    x0 = rng.normal(size=(n, d)) * 10
    taken: list[np.ndarray] = []
    grad = quadratic(n, d)

    def recorded(i, x, k):
        taken.append(grad(i, x, k))
        return taken[-1]

    clock = {"c": rng.uniform(0, 4, (n, n)), "speed": rng.uniform(0.3, 2, n), "jitter": 0.5}
    late = Late(wait, staleness)
    algorithm = OLDSGD(tau=tau, form=form)
    X, Ws, _ = run(algorithm, graph, x0, recorded, rounds, late, wire=wire, clock=clock)
    g = np.stack(taken[: rounds * tau * n]).reshape(rounds, tau, n, d)
    expected = x0.mean(0) - alpha * np.cumsum(g.mean(2).sum(1), 0)
    np.testing.assert_allclose(X[1:].mean(1), expected, rtol=1e-9, atol=1e-9)
    in_a_row = np.zeros((graph.period, n, n), dtype=int)
    for r, W in enumerate(Ws):
        np.testing.assert_allclose(W.sum(0), 1, atol=1e-12)
        np.testing.assert_array_equal(W, W.T)
        out = (W == 0) & (graph.matrix(r) > 0)
        in_a_row[r % graph.period] = np.where(out, in_a_row[r % graph.period] + 1, 0)
        assert in_a_row.max(initial=0) <= staleness
        if wire is None:
            np.testing.assert_allclose(X[r + 1], W @ X[r] - alpha * g[r].sum(0), atol=1e-9)


@pytest.mark.parametrize("wire", [torch.bfloat16, Narrow(8), Narrow(4)], ids=str)
def test_a_narrow_wire_keeps_the_mean_exactly_with_edges_left_out(wire):
    """Whole numbers: every sum and product is exact, though the wire rounds and agents are late."""
    n = 6
    W = np.eye(n) / 2 + (np.roll(np.eye(n), 1, 1) + np.roll(np.eye(n), -1, 1)) / 4
    X = torch.from_numpy(np.random.default_rng(1).integers(-5000, 5000, (n, 33)) * 16.0)
    X = X if isinstance(wire, Narrow) else X.float()  # fp64 holds codes times scales
    clock = Clock(n, 1.0, speed=np.array([1, 1, 0.2, 1, 1, 1.0]))
    transport = StackedTransport(topology.from_matrix(W), clock, wire, Late(0.0))
    total = X.double().sum(0)
    for round in range(2):
        flight = transport.exchange(X, round)
        for _ in range(2):
            clock.compute()
        flight.mix_into(X)
        assert torch.equal(X.double().sum(0), total)
    # Agent 2 was late in round 1, for both of its neighbours, and they for it.
    e, out = transport.edges(0), ~flight.used
    left_out = set(zip(e.owner[out].tolist(), e.neighbour[out].tolist(), strict=True))
    assert left_out == {(1, 2), (2, 1), (2, 3), (3, 2)}
    assert transport.records[-1].left_out == pytest.approx(4 / n)


@pytest.mark.parametrize("algorithm", [OLDSGD(tau=3), OLDSGD(tau=2, form="gradient"), KGT(tau=2)])
def test_with_patience_nothing_changes(algorithm):
    n, d = 7, 9
    graph, grad = topology.from_name("ring", n), quadratic(n, d)
    x0 = np.random.default_rng(0).normal(size=(n, d))
    clock = {"c": 1.7, "jitter": 0.6, "seed": 3}
    X, _, t = run(algorithm, graph, x0, grad, 6, None, clock=clock)
    Y, _, s = run(algorithm, graph, x0, grad, 6, Late(1e9), clock=clock)
    assert np.array_equal(X, Y) and np.array_equal(t, s)


def test_tracking_terms_still_sum_to_zero():
    n, d = 6, 4
    clock = Clock(n, 1.0, jitter=0.8)
    transport = StackedTransport(topology.from_name("ring", n), clock, None, Late(0.1))
    runner = Plain(rows(n, d, torch.float64), KGT(tau=2), transport, 0.05)
    grad = quadratic(n, d)
    runner.start()
    for k in range(24):
        runner.advance(
            torch.from_numpy(np.stack([grad(i, runner.x[i].numpy(), k) for i in range(n)]))
        )
    assert any(r.left_out for r in transport.records)
    assert runner.algorithm.state_dict()["c"].sum(0).abs().max() < 1e-12
    assert {lane for lane, *_ in transport.left_out} == {0, 1}  # x and z, each with its own count


def test_a_hiccup_no_longer_stops_the_others():
    """Jitter: an agent that goes on saves time; a permanently slow one is waited for in the end."""
    n, rounds = 9, 60

    def end(late, **clock):
        x0 = np.zeros((n, 1))
        result = trajectory(
            OLDSGD(tau=2), "ring", x0, lambda X, k: 0 * X, 0.1, rounds, batched=True, late=late,
            **clock,
        )  # fmt: skip
        return result.time[-1]

    jitter = {"c": 1.5, "jitter": 0.7, "seed": 5}
    assert end(Late(0.0, 3), **jitter) < 0.93 * end(None, **jitter)
    slow = {"c": 1.0, "speed": np.array([1, 1, 1, 0.4, 1, 1, 1, 1, 1])}
    assert end(Late(0.0, 2), **slow) == end(None, **slow) == rounds * 2 / 0.4


def test_a_saved_state_goes_on_where_it_was():
    n, d, graph = 5, 3, topology.from_name("ring", 5)
    grad = quadratic(n, d)

    def steps(runner, k0, k1):
        for k in range(k0, k1):
            g = np.stack([grad(i, runner.x[i].numpy(), k) for i in range(n)])
            runner.advance(torch.from_numpy(g))

    def made():
        clock = Clock(n, 1.4, jitter=0.7)
        transport = StackedTransport(graph, clock, None, Late(0.0, 2))
        return Plain(rows(n, d, torch.float64), OLDSGD(tau=2), transport, 0.05)

    whole, saved = made(), {}

    def save(runner):
        if runner.r == 4:
            transport = runner.transport
            saved.update(
                runner={**runner.state_dict(), "x": runner.x.clone()},
                clock=transport.clock.state_dict(), transport=transport.state_dict(),
            )  # fmt: skip

    whole.on_round.append(save)
    whole.start()
    steps(whole, 0, 20)
    resumed = made()
    assert any(saved["transport"]["left_out"]["0:0:0"])
    resumed.transport.clock.load_state_dict(saved["clock"])
    resumed.transport.load_state_dict(saved["transport"])
    resumed.load_state_dict(saved["runner"])
    steps(resumed, 8, 20)
    assert torch.equal(whole.x, resumed.x)
    assert np.array_equal(whole.transport.clock.t, resumed.transport.clock.t)


def test_bad_settings_are_refused():
    for bad in ({"wait": -1.0}, {"wait": float("nan")}, {"staleness": 0}):
        with pytest.raises(UserError, match="at least"):
            Late(**bad)
    x0 = np.zeros((3, 1))
    with pytest.raises(UserError, match="averages over all agents"):
        trajectory(LSGD(), "ring", x0, lambda X, k: X, 0.1, 1, batched=True, late=Late())
    trajectory(LDSGD(), "ring", x0, lambda X, k: X, 0.1, 1, batched=True, late=Late())
