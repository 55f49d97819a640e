"""The difference wire in the simulator: its equations, written out, and what they promise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import KGT, LUGT, OLDSGD, XOLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.trajectory import trajectory
from hpc_oldsgd.training.choose import kinds
from hpc_oldsgd.transport.late import Late
from hpc_oldsgd.transport.narrow import Narrow
from support.small_problems import quadratic, rows

BLOCK = 64
EXCHANGING = [
    "oldsgd",
    "xoldsgd",
    "ldsgd",
    "dsgd",
    "dsgd_cta",
    "kgt",
    "lugt",
    "led",
    "oled",
    "olgt",
    "noloco",
    "moldsgd",
]


def test_none_that_exchanges_is_forgotten_here():
    ring = topology.from_name("ring", 4)
    known = {name: algorithms.get(name)() for name in algorithms.names()}
    exchanging = {name for name, made in known.items() if "exchange" in kinds(made, ring)}
    assert exchanging == set(EXCHANGING)


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("name", algorithms.names())
def test_the_copies_of_all_that_is_exchanged_are_counted(name, tau):
    """What the memory check rests on: public copies of so many tensors, for each phase."""
    X = rows(4, 960)
    algorithm = algorithms.near_tau(name, tau)
    transport = StackedTransport(topology.from_name("one-peer-ring", 4), wire=Narrow(8))
    runner = Plain(X, algorithm, transport, 0.01)
    runner.start()
    while runner.r < 4:
        runner.advance(torch.zeros_like(X))
    assert transport.streams.held_bytes == 2 * algorithm.exchanged * X.nbytes


def q(delta: np.ndarray, bits: int) -> np.ndarray:
    """Q of one agent's difference, literally: blocks, the largest magnitude is the top level."""
    top, out = delta.dtype.type(2 ** (bits - 1) - 1), np.zeros_like(delta)
    for a in range(0, len(delta), BLOCK):
        block = delta[a : a + BLOCK]
        largest = torch.tensor(np.abs(block).max() / top).float()
        scale = delta.dtype.type(largest.bfloat16().item())
        if scale:
            out[a : a + BLOCK] = np.round(block * (delta.dtype.type(1) / scale)) * scale
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("graph", ["ring", "one-peer-ring"])
def test_the_equations(bits, fragments, graph):
    n, d, tau, rounds, alpha = 4, 1000, 3, 6, 0.05
    dtype = np.float64  # in fp32 a number may stand on the border between two levels
    W = topology.from_name(graph, n)
    grad = quadratic(n, d, dtype)
    x0 = rows(n, d).numpy().astype(dtype)
    run = trajectory(
        OLDSGD(tau=tau, fragments=fragments), W, x0, grad, alpha, rounds, wire=f"int{bits}"
    )
    bounds = [0, 352, 704, d] if fragments == 3 else [0, d]  # whole lines of 32
    x, z = x0.copy(), {}
    for r in range(rounds):
        phase, M = r % W.period, W.matrix(r)
        for k, (a, b) in enumerate(pairwise(bounds)):
            if (phase, a) in z:
                for i in range(n):
                    z[phase, a][i] += q(x[i, a:b] - z[phase, a][i], bits)
            else:
                z[phase, a] = x[:, a:b].copy()
            for step in range(k * tau // fragments, (k + 1) * tau // fragments):
                x -= dtype(alpha) * np.stack([grad(i, x[i], r * tau + step) for i in range(n)])
            public = z[phase, a]
            e = sum(M[:, [j]] * (public[j] - public) for j in range(n))
            x[:, a:b] += e.astype(dtype)
        np.testing.assert_allclose(run.X[r + 1], x, rtol=0, atol=1e-12 * np.abs(x0).max())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", EXCHANGING)
def test_every_algorithm_that_exchanges_comes_to_the_same_end(name, bits):
    """Means as close to those of the full wire as rounding leaves them, where they are kept."""
    n, d, rounds = 5, 300, 40
    x0, grad = rows(n, d).numpy().astype(np.float64), quadratic(n, d)
    algorithm = algorithms.near_tau(name, 2)
    full, narrow = (
        trajectory(algorithm, "ring", x0, grad, 0.02, rounds, wire=wire)
        for wire in (None, f"int{bits}")
    )
    assert not np.array_equal(full.X[2], narrow.X[2])
    near = 0.3 if name == "oled" else 0.01  # which stands on the border of stability
    assert np.abs(full.X[-1] - narrow.X[-1]).max() < near * np.abs(x0).max()
    assert np.abs(full.mean[3] - narrow.mean[3]).max() < 0.05


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mixing_alone_keeps_the_mean_and_brings_all_to_it(bits, dtype):
    X = rows(6, 500, dtype)
    before, start = X.double().mean(0), X.double().std(0).mean()
    transport = StackedTransport(topology.from_name("ring", 6), wire=Narrow(bits))
    runner = Plain(X, OLDSGD(tau=1), transport, 0.0)
    runner.start()
    for _ in range(60):
        runner.advance(torch.zeros_like(X))
    runner.finish()
    rounding = 200 * torch.finfo(dtype).eps * float(X.abs().max())
    assert float((X.double().mean(0) - before).abs().max()) < rounding
    assert float(X.double().std(0).mean()) < max(1e-3 * float(start), rounding)


@pytest.mark.parametrize(
    "kind",
    [OLDSGD(tau=2, fragments=2), KGT(tau=2), LUGT(tau=2), XOLDSGD(tau=3, fragments=2)],
    ids=str,
)
@pytest.mark.parametrize("after_the_boundary", [False, True])
def test_a_resumed_run_is_the_run_that_never_stopped(kind, after_the_boundary):
    """Saved by an observer of the boundary, or once the next messages have left."""
    n, d = 4, 400
    late = None if after_the_boundary else Late(wait=0.2, staleness=2)

    def make(x):
        clock = Clock(n, 6.0, np.array([1.0, 1.0, 0.4, 1.0]))
        graph = topology.from_name("one-peer-ring", n)
        return Plain(x, kind, StackedTransport(graph, clock, Narrow(4), late), 0.05)

    runner = make(rows(n, d))
    transport = runner.transport
    grad, saved = quadratic(n, d, np.float32), []

    def save(_):
        state = {"clock": transport.clock.state_dict(), "transport": transport.state_dict()}
        whole = {**runner.state_dict(), **state}
        copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.items()}
        copied["algorithm"] = {k: v.clone() for k, v in whole["algorithm"].items()}
        copied["streams"] = {k: {**s, "z": s["z"].clone()} for k, s in whole["streams"].items()}
        saved.append(copied)

    def go(runner, rounds):
        while runner.r < rounds:
            x = runner.x.numpy()
            runner.advance(torch.from_numpy(np.stack([grad(i, x[i], runner.t) for i in range(n)])))
            if after_the_boundary and runner.at_boundary and runner.r == 5:
                save(runner)

    if not after_the_boundary:
        runner.observers.append(lambda r: save(r) if r.r == 5 else None)
    runner.start()
    go(runner, 9)
    again = make(torch.zeros(n, d))
    again.transport.clock.load_state_dict(saved[0]["clock"])
    again.transport.load_state_dict(saved[0]["transport"])
    again.load_state_dict(saved[0])
    assert again.r == 5
    go(again, 9)
    assert torch.equal(runner.x, again.x)
    if late is not None:
        assert any(record.left_out for record in transport.records)
        assert np.array_equal(transport.clock.t, again.transport.clock.t)
    assert all("z" in s and set(s) == {"z", "holds_x"} for s in saved[0]["streams"].values())


def test_the_clock_charges_by_the_bytes_and_the_first_message_whole():
    n, d, c = 4, 128 * 40, 8.0
    run = trajectory(
        OLDSGD(tau=1),
        "ring",
        rows(n, d).numpy(),
        quadratic(n, d, np.float32),
        0.01,
        4,
        c,
        wire="int4",
    )
    assert np.diff(run.time) == pytest.approx([8.0, *[c * (0.125 + 2 / 64 / 4)] * 3])


def test_the_gradient_form_and_unknown_wires_are_refused():
    x0, grad = rows(4, 8).numpy(), quadratic(4, 8, np.float32)
    with pytest.raises(UserError, match='use form="delta"'):
        trajectory(OLDSGD(form="gradient"), "ring", x0, grad, 0.1, 1, wire="int8")
    with pytest.raises(UserError, match="there is no wire type 'int2'"):
        trajectory(OLDSGD(), "ring", x0, grad, 0.1, 1, wire="int2")


def test_fragments_of_another_tau_leave_no_copies_behind():
    n, d = 4, 320
    transport = StackedTransport(topology.from_name("ring", n), wire=Narrow(8))
    runner = Plain(rows(n, d), OLDSGD(tau=4, fragments=4), transport, 0.0)
    runner.start()
    for tau in (4, 2, 1, 4):
        runner.algorithm.tau = tau
        for _ in range(3 * 4):
            runner.advance(torch.zeros(n, d))
        assert transport.streams.held_bytes == n * d * 4
