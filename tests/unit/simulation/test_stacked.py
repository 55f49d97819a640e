"""The stacked transport: its contracts, and the mean that no wire type may move."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import LDSGD, OLDSGD
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.trajectory import trajectory
from hpc_oldsgd.transport.narrow import Narrow
from support.memory import tensor_bytes
from support.small_problems import quadratic, random_topologies, rows

HALVES = [torch.bfloat16, torch.float16]
DIFFERENCES = [Narrow(8), Narrow(4)]


@settings(max_examples=60)
@given(
    n=st.integers(1, 12),
    tau=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([np.float32, np.float64]),
    wire=st.sampled_from([None, *HALVES, *DIFFERENCES]),
    form=st.sampled_from(["delta", "gradient"]),
)
def test_the_mean_follows_plain_sgd(n, tau, seed, dtype, wire, form):
    """xbar^t = xbar^{t-1} - (alpha/n) sum_i g_i^{t-1}, for any W, summed over each round."""
    if form == "gradient" and wire is not None:
        wire = None  # replaces x by what was sent: the wire's rounding stays
    d, alpha, rounds = 11, 0.05, 4
    x0 = np.random.default_rng(seed).normal(size=(n, d)).astype(dtype) * 10
    taken: list[np.ndarray] = []
    grad = quadratic(n, d, dtype)

    def recorded(X: np.ndarray, k: int) -> np.ndarray:
        taken.append(np.stack([grad(i, X[i], k) for i in range(n)]))
        return taken[-1]

    graph = next(random_topologies(n, seed))
    algorithm = OLDSGD(tau=tau, form=form)
    run = trajectory(algorithm, graph, x0, recorded, alpha, rounds, wire=wire, batched=True)
    steps = np.stack(taken[: rounds * tau]).astype(np.float64).mean(1)
    expected = x0.astype(np.float64).mean(0) - alpha * np.cumsum(steps, 0)[tau - 1 :: tau]
    # Rounding of the additions in x's own type, nothing of the wire's (2^-8 and 2^-11).
    limit = 30 * rounds * tau * np.finfo(dtype).eps * max(1.0, np.abs(run.X).max())
    assert np.abs(run.mean[1:].astype(np.float64) - expected).max() <= limit


def cycle(n: int, rng: np.random.Generator) -> np.ndarray:
    """W of a random ring with weights 1/2 and 1/4: whole numbers times 4 stay whole."""
    P = np.roll(np.eye(n), 1, axis=1)[order := rng.permutation(n)][:, order]
    return np.eye(n) / 2 + (P + P.T) / 4


@settings(max_examples=40)
@given(n=st.integers(1, 10), seed=st.integers(0, 10**6), wire=st.sampled_from(HALVES))
def test_a_narrow_wire_keeps_the_mean_exactly(n, seed, wire):
    """Whole numbers: every sum and product is exact in fp32, though the wire itself rounds."""
    rng = np.random.default_rng(seed)
    graph = topology.from_matrix([cycle(n, rng) for _ in range(2)])
    X = torch.from_numpy(rng.integers(-5000, 5000, (n, 33)) * 16.0).float().clamp(-60000, 60000)
    X[:, 0] = 40961  # no bf16 and no fp16
    assert not torch.equal(X, X.to(wire).float())
    transport = StackedTransport(graph, wire=wire)
    total = X.double().sum(0)
    for round in range(2):  # a third division by 4 would leave the whole numbers
        before = X.clone()
        transport.exchange(X, round).mix_into(X)
        assert torch.equal(X.double().sum(0), total)
    assert n == 1 or not torch.equal(before, X)


@settings(max_examples=40)
@given(n=st.integers(1, 10), seed=st.integers(0, 10**6), wire=st.sampled_from(DIFFERENCES))
def test_differences_keep_the_mean_exactly(n, seed, wire):
    """A scale has 8 bits, so that fp64 holds every sum and product, whatever the codes lose."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.integers(-5000, 5000, (n, 133)) * 16.0)
    X[:, 70] *= 2.0**7
    transport = StackedTransport(topology.from_matrix([cycle(n, rng) for _ in range(2)]), wire=wire)
    start, total = X.clone(), X.sum(0)
    for round in range(6):
        transport.exchange(X, round).mix_into(X)
        assert torch.equal(X.sum(0), total)
    assert n == 1 or not torch.equal(start, X)


def test_replacing_x_by_what_was_sent_would_lose_the_mean():
    """Why the delta form; and it shows that the tests above can fail."""
    X = rows(6, 500)
    mean = X.double().mean(0)
    for wire, kept in ((torch.bfloat16, False), (None, True)):
        out = torch.empty_like(X)
        transport = StackedTransport(topology.from_name("ring", 6), wire=wire)
        transport.exchange(X, 0).mix(out)
        error = (out.double().mean(0) - mean).abs().max()
        assert (error < 1e-5) == kept


@pytest.mark.parametrize("graph", ["ring", "complete", "star", "one-peer-ring"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_mixing_is_w(graph, n):
    W = topology.from_name(graph, n)
    transport = StackedTransport(W)
    for round in range(3):
        X = rows(n, 37, torch.float64, seed=round)
        expected = W.matrix(round) @ X.numpy()
        out = transport.exchange(X, round).mix(torch.empty_like(X))
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
        transport.exchange(X, round).mix_into(X)
        np.testing.assert_allclose(X, expected, rtol=1e-12, atol=1e-12)


def test_what_was_sent_does_not_change_with_x():
    transport = StackedTransport(topology.from_name("ring", 5))
    X = rows(5, 8)
    sent = X.clone()
    flight = transport.exchange(X, 0)
    X.zero_()
    out = flight.mix(torch.empty_like(X))
    torch.testing.assert_close(out, torch.tensor(transport.topology.W).float() @ sent)
    assert not X.any()


def test_several_flights_end_in_any_order():
    graph, held = topology.from_name("ring", 4), set()
    transport = StackedTransport(graph)
    sent = [rows(4, 9, seed=k) for k in range(3)]
    for order in itertools.permutations(range(3)):
        flights = [transport.exchange(X, 0) for X in sent]
        for k in order:
            out = flights[k].mix(torch.empty(4, 9))
            torch.testing.assert_close(out, torch.tensor(graph.W).float() @ sent[k])
        del flights, out
        held.add(tensor_bytes())
    assert len(held) == 1  # the memory of ended flights is used again


def test_snapshots_of_open_flights_are_never_reused():
    transport = StackedTransport(topology.from_name("ring", 4))
    X, Y = rows(4, 9), rows(4, 9, seed=1)
    transport.exchange(X, 0).mix(torch.empty(4, 9))  # leaves a spare snapshot
    first, second = transport.exchange(X, 0), transport.exchange(Y, 0)
    W = torch.tensor(transport.topology.W).float()
    torch.testing.assert_close(first.mix(torch.empty(4, 9)), W @ X)
    torch.testing.assert_close(second.mix(torch.empty(4, 9)), W @ Y)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("d", [0, 1, 5, 20])
def test_all_reduce_is_the_mean_on_every_agent(n, d):
    X = rows(n, d, torch.float64)
    transport = StackedTransport(topology.from_name("ring", n))
    reduction = transport.all_reduce(X, 0)
    mean = X.mean(0).expand(n, d).clone()
    X.zero_()
    out = reduction.mean(torch.empty_like(X))
    torch.testing.assert_close(out, mean)
    assert all(torch.equal(out[0], row) for row in out)


def test_distance_is_measured_on_the_way():
    graph = topology.from_name("ring", 5)
    transport = StackedTransport(graph)
    transport.measure_distance = True
    X = rows(5, 30, torch.float64)
    Y = X.clone()
    transport.exchange(X, 0).mix_into(X)
    literal = [
        sum(w * ((Y[j] - Y[i]) ** 2).sum().item() for j, w in graph.neighbours(i)) for i in range(5)
    ]
    np.testing.assert_allclose(np.asarray(transport.distance), literal, rtol=1e-10)


def test_records_hold_virtual_times():
    for algorithm, exposed in ((OLDSGD(tau=2), 1.0), (LDSGD(tau=2), 3.0)):
        transport = StackedTransport(topology.from_name("ring", 4), Clock(4, 3.0))
        runner = Plain(torch.zeros(4, 1), algorithm, transport, 0.1)
        runner.start()
        for _ in range(6):
            runner.advance(torch.zeros(4, 1))
        assert [r.round for r in transport.records] == [0, 1, 2]
        for record in transport.records:
            assert record.transfer == 3.0
            assert record.exposed == exposed


def test_drain_completes_what_is_open():
    transport = StackedTransport(topology.from_name("ring", 3))
    X = rows(3, 4)
    transport.exchange(X, 0)
    transport.all_reduce(X, 0)
    transport.drain()
    assert {record.kind for record in transport.records} == {"exchange", "all_reduce"}
    transport.close()
    transport.close()
    assert len(transport.records) == 2
