"""--late reuse over MPI: both ends of every edge agree in every round, so the mean is kept."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import OLDSGD
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.slowdown import pause
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.transport.late import Late
from hpc_oldsgd.transport.mpi import MpiTransport
from support.memory import count_from_now, tensor_bytes
from support.small_problems import rows

D = 1003
WENT_ON = 77  # a tag
WAYS: list[dict[str, Any]] = [
    {"progress": "thread"},
    {"progress": "thread", "staging": "host", "largest_message_bytes": 1000},
    {"progress": "poll"},
    {"progress": "none"},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=["thread", "host", "poll", "none"])


@every_way
@pytest.mark.parametrize("graph", ["ring", "one-peer-ring"])
def test_with_patience_nothing_changes(comm, way, graph):
    n, i = comm.size, comm.rank
    W = topology.from_name(graph, n)
    transport = MpiTransport(comm, W, late=Late(1e9), **way)
    stacked = StackedTransport(W)
    X = rows(n, D)
    x = X[i].clone()
    for round in range(4):
        flight = transport.exchange(x, round)
        time.sleep(0.001 * ((i + round) % 3))
        transport.computed()
        flight.mix_into(x, snapshot=round != 1)
        stacked.exchange(X, round).mix_into(X)
        assert torch.equal(x, X[i])
        assert transport.records[-1].left_out == 0
    G, acc = rows(n, D, seed=3), rows(n, D, seed=3)[i].clone()
    transport.exchange(x, 4).mix(x, acc, 0.3, zero_acc=True)
    stacked.exchange(X, 4).mix(X, G, 0.3)
    assert torch.equal(x, X[i])
    transport.close()


def run(comm, transport, rounds, sleep):
    """x at every boundary, and what this rank left out: gathered only when all is over."""
    x = rows(comm.size, D, torch.float64)[comm.rank].clone()
    at, out = [x.numpy().copy()], []
    comm.Barrier()
    for round in range(rounds):
        flight = transport.exchange(x, round)
        pause(sleep(round), transport.poll)
        transport.computed()
        flight.mix_into(x, snapshot=round % 2 == 0)
        at.append(x.numpy().copy())
        out.append([edge.j for edge in flight.edges if not edge.used])
        assert transport.records[-1].left_out == len(out[-1])
    transport.drain()
    assert all(edge.idle for channel in transport._channels for edge in channel.edges.values())
    return np.stack(comm.allgather(np.stack(at)), axis=1), comm.allgather(out)


def check(graph, X, left_out, staleness):
    """The literal update with the W that was, which both ends moved the same weights of."""
    in_a_row = np.zeros((graph.period, graph.n, graph.n), dtype=int)
    for r in range(len(X) - 1):
        W, out = graph.matrix(r).copy(), np.zeros((graph.n, graph.n), dtype=bool)
        for i in range(graph.n):
            for j in left_out[i][r]:
                out[i, j] = True
                W[i, i] += W[i, j]
                W[i, j] = 0.0
        assert np.array_equal(out, out.T), f"round {r}: one end used the edge, the other did not"
        np.testing.assert_allclose(X[r + 1], W @ X[r], rtol=0, atol=1e-12)
        np.testing.assert_allclose(X[r + 1].mean(0), X[0].mean(0), rtol=0, atol=1e-12)
        counts = in_a_row[r % graph.period]
        in_a_row[r % graph.period] = np.where(out, counts + 1, 0)
        assert counts.max() <= staleness


@pytest.mark.mpi(min_size=2)
@every_way
def test_a_late_rank_is_left_out_and_the_mean_stays(comm, way):
    """Rank 1 sleeps through a round: its neighbours go on, once, and both sides know it."""
    n, i = comm.size, comm.rank
    graph = topology.from_name("complete" if n < 9 else "ring", n)
    count_from_now()
    before_bytes = tensor_bytes()
    transport = MpiTransport(comm, graph, late=Late(0.03, 1), **way)
    neighbours = {j for j, _ in graph.neighbours(1)}
    helped = way["progress"] != "none"  # where nobody says yes for a sleeping rank

    def sleep(r: int) -> float:
        """Rank 1 does until its neighbours have gone on, which takes a busy machine its time."""
        if helped and r == 3 and i in neighbours:
            comm.Isend(np.zeros(1), 1, WENT_ON).Wait()
        if i != 1 or r != 1:
            return 0.002
        gone: set[int] = set()
        until = time.perf_counter() + (10.0 if helped else 0.5)  # or who went on in round 1 waits
        while gone != neighbours and time.perf_counter() < until:
            pause(0.002, transport.poll)
            gone |= {j for j in neighbours - gone if comm.Iprobe(j, WENT_ON)}
        return 0.0

    X, left_out = run(comm, transport, 6, sleep)
    if helped and i == 1:
        for j in neighbours:
            comm.Recv(np.zeros(1), j, WENT_ON)
    check(graph, X, left_out, 1)
    if helped:
        # In round 2, or before it where the machine was busy: they waited for it in vain.
        assert {j for out in left_out[1] for j in out} == neighbours
    # Own snapshots, staleness + 1 of them, and one of each neighbour; staging holds them twice.
    tensors = (1 + 1 + len(graph.neighbours(i))) * (2 if "staging" in way else 1)
    assert tensor_bytes() - before_bytes <= tensors * D * 8
    transport.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("graph", ["ring", "one-peer-ring"])
def test_random_pauses_never_divide_the_ends(comm, graph):
    n, i = comm.size, comm.rank
    W = topology.from_name(graph, n)
    transport = MpiTransport(comm, W, late=Late(0.0005, 2))
    random = np.random.default_rng(i)
    pauses = np.where(random.random(40) < 0.15, 0.02, 0.0005)
    for _ in range(9):  # that nobody is late in all of them does not happen
        X, left_out = run(comm, transport, 40, lambda r: pauses[r])
        check(W, X, left_out, 2)
        if any(out for rank in left_out for out in rank):
            break
    else:
        pytest.fail("no neighbour was ever left out")
    x = torch.ones(D, dtype=torch.float64) * i
    transport.exchange(x, 40).wait()  # goes on after the drain, and closes with it open
    transport.close()
    transport.close()


@pytest.mark.mpi(min_size=2)
def test_edges_of_single_fragments_are_left_out_and_the_mean_stays(comm):
    n, i = comm.size, comm.rank
    x = rows(n, D, torch.float64)[i].clone()
    before = comm.allreduce(x.numpy().copy(), MPI.SUM)
    transport = MpiTransport(comm, topology.from_name("ring", n), late=Late(0.0005, 2))
    runner = Plain(x, OLDSGD(tau=3, fragments=3), transport, 0.1)
    random = np.random.default_rng(i)
    runner.start()
    for _ in range(30):  # that nobody is late in all of them does not happen
        for _ in range(3 * 5):
            time.sleep(0.02 if random.random() < 0.15 else 0.0005)
            runner.advance(torch.zeros_like(x))
        out = comm.allreduce(np.array([f.left_out for f in transport.records]), MPI.SUM)
        transport.records.clear()
        assert (out % 2 == 0).all(), "one end used the edge, the other did not"
        if out.any():
            break
    else:
        pytest.fail("no neighbour was ever left out")
    runner.finish()
    np.testing.assert_allclose(comm.allreduce(x.numpy(), MPI.SUM), before, rtol=0, atol=1e-10)


@pytest.mark.mpi(min_size=2)
def test_two_flights_at_once_have_their_own_words(comm):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), late=Late(0.01, 1))
    x, z = rows(n, D)[i].clone(), rows(n, 17, seed=1)[i].clone()
    sums = [comm.allreduce(t.double().sum().item(), MPI.SUM) for t in (x, z)]
    for round in range(5):
        early = transport.exchange(x, round)
        time.sleep(0.05 if i == round % n else 0.0)
        late = transport.exchange(z, round)
        early.mix_into(x)
        late.mix_into(z)
    for t, before in zip((x, z), sums, strict=True):
        assert comm.allreduce(t.double().sum().item(), MPI.SUM) == pytest.approx(before, abs=1e-3)
    transport.close()
