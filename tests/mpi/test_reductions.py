"""Means and sums over all ranks, in every way messages can be moved."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from hpc_oldsgd import topology
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.transport.mpi import MpiTransport
from support.message_ways import FAST, D, every_way
from support.small_problems import rows


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_of_16_bit_models_does_not_overflow(comm, dtype):
    """40,000 is near fp16's largest number; the sum of two is beyond it."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), **FAST)
    X = rows(n, D, dtype).fill_(40_000.0) + rows(n, D, dtype)
    mean = transport.all_reduce(X[i], 0).mean(torch.empty(D, dtype=dtype))
    stacked = StackedTransport(topology.from_name("ring", n)).all_reduce(X, 0)
    assert torch.equal(mean, stacked.mean(torch.empty_like(X))[i])
    torch.testing.assert_close(mean.double(), X.double().mean(0), rtol=1e-2, atol=0)
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
