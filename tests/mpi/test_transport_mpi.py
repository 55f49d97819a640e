"""The contracts of transport/base.py over MPI, in every way messages can be moved."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from problems import rows

from hpc_oldsgd import ops, topology
from hpc_oldsgd.errors import NeighbourTimeout, UserError
from hpc_oldsgd.transport.mpi import MpiTransport
from hpc_oldsgd.transport.stacked import StackedTransport

D = 1003  # divisible by nothing that could hide a slip
WAYS = [
    pytest.param(
        {"progress": progress, "native": native, "staging": staging},
        id=f"{progress}-{'native' if native else 'python'}-{staging}",
        marks=pytest.mark.skipif(native and not ops.native_available(), reason="not built"),
    )
    for progress, native, staging in itertools.product(
        ("thread", "poll", "none"), (True, False), ("direct", "host")
    )
]
if MPI.COMM_WORLD.size > 3:  # each way is tried by few ranks; with many, one of each kind
    WAYS = [WAYS[k] for k in (0, 1, 2, 7, 8)]
GRAPHS = ["ring", "complete", "one-peer-ring"]
every_way = pytest.mark.parametrize("way", WAYS)
FAST: dict[str, Any] = {"progress": "thread"}


def mixed(graph: str, X: torch.Tensor, round: int, wire: torch.dtype | None = None) -> torch.Tensor:
    """What the stacked transport makes of the same rows."""
    X = X.clone()
    StackedTransport(topology.from_name(graph, len(X)), wire=wire).exchange(X, round).mix_into(X)
    return X


@every_way
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_flight_mixes_what_the_neighbours_sent(comm, way, graph):
    i, graph_n = comm.rank, topology.from_name(graph, comm.size)
    transport = MpiTransport(comm, graph_n, **way)
    for round in range(4):
        X = rows(comm.size, D, seed=round)
        x = X[i].clone()
        flight = transport.exchange(x, round)
        x.fill_(-1e9)  # ours to change at once: the snapshot is on its way
        x.copy_(X[i])
        flight.mix_into(x)
        W = graph_n.matrix(round)
        literal = sum(W[i, j] * X[j].double() for j in range(comm.size))
        torch.testing.assert_close(x.double(), literal, rtol=1e-5, atol=1e-5)
        assert torch.equal(x, mixed(graph, X, round)[i])
        assert not transport._open
    transport.close()


@every_way
def test_what_was_sent_does_not_change_with_x(comm, way):
    n, i = comm.size, comm.rank
    X = rows(n, D)
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    x = X[i].clone()
    flight = transport.exchange(x, 0)
    x.zero_()
    time.sleep(0.01)
    x.add_(i)
    out = flight.mix(torch.empty(D))
    W = topology.from_name("ring", n).W
    literal = sum(W[i, j] * X[j].double() for j in range(n))
    torch.testing.assert_close(out.double(), literal, rtol=1e-5, atol=1e-5)
    assert bool((x == i).all())
    transport.close()


@every_way
def test_gradient_form_over_mpi_is_the_stacked_one(comm, way):
    n, i = comm.size, comm.rank
    graph = topology.from_name("complete", n)
    transport = MpiTransport(comm, graph, **way)
    X, G = rows(n, D), rows(n, D, seed=1)
    x, acc = X[i].clone(), G[i].clone()
    transport.exchange(x, 0).mix(x, acc, 0.3, zero_acc=True)
    stacked = StackedTransport(graph)
    Y, A = X.clone(), G.clone()
    stacked.exchange(Y, 0).mix(Y, A, 0.3, zero_acc=True)
    assert torch.equal(x, Y[i])
    assert not acc.any() and not A.any()
    transport.close()


@every_way
def test_several_flights_at_once_end_in_any_order(comm, way):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    sent = [rows(n, d, seed=d) for d in (D, D, 17, D, D, D)]  # more than staging has threads
    own = [X[i].clone() for X in sent]
    for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)):
        own = [X[i].clone() for X in sent]
        flights = [transport.exchange(x, 0) for x in own]
        for k in order:
            flights[k].mix_into(own[k])
            assert torch.equal(own[k], mixed("ring", sent[k], 0)[i])
    assert len(transport._channels) == 6  # made once, used again
    transport.close()


@every_way
@pytest.mark.parametrize("d", [D, 1, 5])
def test_ring_all_reduce_is_the_stacked_one(comm, way, d):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    stacked = StackedTransport(topology.from_name("ring", n))
    for seed in range(3):
        X = rows(n, d, seed=seed)
        x = X[i].clone()
        first, second = transport.all_reduce(x, 0), transport.all_reduce(2 * x, 0)
        x.fill_(7)
        mean = stacked.all_reduce(X, 0).mean(torch.empty_like(X))[i]
        assert torch.equal(second.mean(torch.empty(d)), 2 * mean)
        assert torch.equal(first.mean(torch.empty(d)), mean)
        torch.testing.assert_close(mean.double(), X.double().mean(0), rtol=1e-5, atol=1e-5)
    transport.close()


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mpis_own_all_reduce_averages_too(comm, way, dtype):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), all_reduce="mpi", **way)
    for seed in range(3):
        X = rows(n, D, dtype, seed)
        x = X[i].clone()
        reductions = [transport.all_reduce(x, 0), transport.all_reduce(x + 1, 0)]
        x.zero_()
        time.sleep(0.002)
        tolerance = {"rtol": 3e-2, "atol": 0.2} if dtype is torch.bfloat16 else {}
        for k in (1, 0):
            mean = reductions[k].mean(torch.empty(D, dtype=dtype))
            torch.testing.assert_close(mean, X.double().mean(0).to(dtype) + k, **tolerance)
        assert len(set(transport.gather_text(str(mean.double().sum().item())))) == 1
    transport.close()


@pytest.mark.parametrize("limit_bytes", [1, 4, 28, 4096])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[-1]])
def test_large_messages_travel_in_pieces(comm, way, limit_bytes):
    n, i, d = comm.size, comm.rank, 103
    transport = MpiTransport(
        comm, topology.from_name("ring", n), largest_message_bytes=limit_bytes, **way
    )
    X = rows(n, d, torch.float64)
    x = X[i].clone()
    transport.exchange(x, 0).mix_into(x)
    assert torch.equal(x, mixed("ring", X, 0)[i])
    mean = transport.all_reduce(X[i], 0).mean(torch.empty(d, dtype=torch.float64))
    torch.testing.assert_close(mean, X.mean(0))
    copy = X[i].clone()
    transport.broadcast(copy)
    assert torch.equal(copy, X[0])
    transport.close()


@pytest.mark.parametrize("resend", [True, False])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_resend_sends_the_x_of_now(comm, resend, wire):
    """The snapshot that the mix has written is used only while x still is what it was then."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), wire=wire, **FAST)
    X = rows(n, D)
    x = X[i].clone()
    for round in range(6):
        transport.exchange(x, round).mix_into(x, resend=resend)
        X = mixed("ring", X, round, wire)
        if round % 3 == 1:
            x.mul_(i + 0.5)
            X.mul_(torch.arange(n).unsqueeze(1) + 0.5)
    assert torch.equal(x, X[i])
    transport.close()


@pytest.mark.parametrize("model", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", [None, torch.float32, torch.bfloat16, torch.float16])
def test_every_type_of_model_and_wire(comm, model, wire):
    if wire is not None and wire.itemsize >= model.itemsize:
        pytest.skip("the wire is never wider than the model")
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), wire=wire, **FAST)
    X = rows(n, D, model)
    x = X[i].clone()
    for round in range(3):
        transport.exchange(x, round).mix_into(x, resend=True)
        X = mixed("ring", X, round, wire)
    assert torch.equal(x, X[i])
    transport.close()


@every_way
def test_numbers_are_reduced_in_the_background(comm, way):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    pending = [
        (k, transport.reduce(np.array([i + k, -i]), "sum" if k % 2 else "max")) for k in range(6)
    ]
    for k, p in reversed(pending):
        ranks = np.arange(n)
        expected = [(ranks + k).sum(), -ranks.sum()] if k % 2 else [n - 1 + k, 0]
        assert p.result().tolist() == expected
        assert p.done()
    transport.close()


@every_way
def test_a_reduction_that_nobody_reads_is_completed(comm, way):
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), **way)
    for k in range(20):
        transport.reduce(np.full(100, float(k)))  # dropped at once
        np.full(100, -1.0)  # takes the memory of what was dropped
    transport.close()


@every_way
def test_drain_and_close_complete_what_is_open(comm, way):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    X = rows(n, D)
    x = X[i].clone()
    for _ in range(3):
        transport.exchange(x, 0)
        transport.all_reduce(x, 0)
        transport.drain()
        assert not transport._open
    flight = transport.exchange(x, 0)
    flight.wait()
    flight.wait()
    flight.mix_into(x)
    assert torch.equal(x, mixed("ring", X, 0)[i])
    transport.exchange(x, 1)
    transport.close()
    transport.close()


@every_way
def test_flights_are_timed(comm, way):
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), **way)
    x = torch.ones(D)
    for round in range(3):
        before = time.perf_counter()
        flight = transport.exchange(x, round)
        time.sleep(0.03)
        transport.computed()
        start = time.perf_counter()
        flight.mix_into(x)
        after = time.perf_counter()
        record = transport.records[-1]
        assert (record.kind, record.round) == ("exchange", round)
        assert before <= record.posted <= record.completed <= after
        assert 0 <= record.exposed <= after - start
    transport.all_reduce(x, 3).mean(x)
    assert transport.records[-1].kind == "all_reduce"
    transport.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[-1]])
def test_a_late_rank_is_named(comm, way):
    """Rank 1 is late; its neighbours say so, and go on once it is there."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("complete", n), timeout_s=0.4, **way)
    comm.Barrier()
    x = rows(n, D)[i]
    if i == 1:
        time.sleep(2.5)
        transport.timeout_s = None
        transport.exchange(x, 7).mix_into(x)
    else:
        flight = transport.exchange(x, 7)
        with pytest.raises(
            NeighbourTimeout, match=rf"rank {i} has waited .* s for rank 1 in round 7"
        ):
            flight.wait()
        transport.timeout_s = None
        flight.mix_into(x)
    assert torch.equal(x, mixed("complete", rows(n, D), 0)[i])
    transport.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[-1]])
def test_nobody_is_late_while_the_agent_computes(comm, way):
    """The limit counts the time an agent stands waiting, not the time its message takes."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("complete", n), timeout_s=1.0, **way)
    comm.Barrier()
    if i == 1:
        time.sleep(2.0)
    x = rows(n, D)[i]
    flight = transport.exchange(x, 0)
    comm.Barrier()  # the others' computation
    flight.mix_into(x)
    assert torch.equal(x, mixed("complete", rows(n, D), 0)[i])
    transport.close()


def test_a_topology_of_another_size_is_refused(comm):
    with pytest.raises(UserError, match="the topology has"):
        MpiTransport(comm, topology.from_name("ring", comm.size + 1))


def test_the_mean_identity_over_mpi(comm):
    """Whole numbers, so that every sum is exact: the mean is kept bit for bit, wire and all."""
    n, i = comm.size, comm.rank

    quarter = topology.from_matrix(_dyadic_ring(n))
    transport = MpiTransport(comm, quarter, wire=torch.bfloat16, **FAST)
    x = torch.from_numpy(np.random.default_rng(i).integers(-4000, 4000, D) * 4.0).float()
    before = comm.allreduce(x.double().numpy(), MPI.SUM)
    assert not torch.equal(x, x.bfloat16().float())  # the wire does round
    transport.exchange(x, 0).mix_into(x)
    after = comm.allreduce(x.double().numpy(), MPI.SUM)
    assert np.array_equal(before, after)
    transport.close()


def _dyadic_ring(n: int) -> np.ndarray:
    W = np.eye(n) / 2
    for k in range(n):
        W[k, (k + 1) % n] += 0.25
        W[k, (k - 1) % n] += 0.25
    return W
