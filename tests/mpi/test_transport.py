"""Exchanges with the neighbours, in every way messages can be moved."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.transport.mpi import MpiTransport
from support.memory import count_from_now, tensor_bytes
from support.message_ways import FAST, GRAPHS, WAYS, D, every_way, mixed
from support.small_problems import rows


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
    held = set()
    count_from_now()
    for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)):
        own = [X[i].clone() for X in sent]
        flights = [transport.exchange(x, 0) for x in own]
        for k in order:
            flights[k].mix_into(own[k])
            assert torch.equal(own[k], mixed("ring", sent[k], 0)[i])
        del flights
        held.add(tensor_bytes())
    assert len(held) == 1  # the memory of ended flights is used again
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


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_snapshot_sends_the_x_of_now(comm, snapshot, wire):
    """The snapshot that the mix has written is used only while x still is what it was then."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), wire=wire, **FAST)
    X = rows(n, D)
    x = X[i].clone()
    for round in range(6):
        transport.exchange(x, round).mix_into(x, snapshot=snapshot)
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
        transport.exchange(x, round).mix_into(x, snapshot=True)
        X = mixed("ring", X, round, wire)
    assert torch.equal(x, X[i])
    transport.close()


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
