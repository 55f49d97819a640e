"""A researcher's own problem in simulated time: a gradient function in, iterates and times out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import topology as topologies
from ..algorithms import Algorithm, get
from ..errors import UserError
from ..runtime.plain import Plain
from ..runtime.runner import Runner
from ..runtime.wire import check_wire, wire_type
from ..topology import Topology
from ..transport.base import Wire
from ..transport.late import Late
from ..transport.narrow import Narrow, check_memory
from .clock import Clock, Times
from .stacked import StackedTransport


@dataclass(frozen=True)
class Trajectory:
    X: NDArray[Any]
    """(rounds + 1, n, d): every agent's model at the round boundaries."""
    time: Times
    """(rounds + 1,): simulated time of the slowest agent there."""
    wait: Times
    """(rounds + 1,): time an agent has stood waiting until then, mean over the agents."""

    @property
    def mean(self) -> NDArray[Any]:
        """(rounds + 1, d): the mean model."""
        mean: NDArray[Any] = self.X.mean(axis=1)
        return mean


def trajectory(
    algorithm: Algorithm | str,
    topology: Topology | str,
    x0: NDArray[Any],
    grad: Callable[[int, NDArray[Any], int], NDArray[Any]],
    alpha: float,
    rounds: int,
    c: float | Times = 1.0,
    *,
    wire: Wire | str = None,
    batched: bool = False,
    late: Late | None = None,
    **clock_options: Any,
) -> Trajectory:
    """Run `rounds` rounds of an algorithm on n agents, x0 being (n, d), float32 or float64.

    `grad(i, x, k)` returns agent i's gradient at x for its k-th draw, k = 0, 1, ...; with
    `batched`, `grad(X, k)` returns all of them as (n, d). x is a view: do not change it.
    `late` leaves out edges whose messages are late (hpc_oldsgd.transport.late).
    `clock_options` (speed, jitter, degree_aware, seed) are those of Clock.
    """
    x0 = np.asarray(x0)
    _check(x0, alpha, rounds)
    n, rounds = x0.shape[0], int(rounds)
    algorithm = get(algorithm)() if isinstance(algorithm, str) else algorithm
    topology = topologies.from_name(topology, n) if isinstance(topology, str) else topology
    if topology.n != n:
        raise UserError(f"x0 has {n} rows, the topology {topology.n} agents")
    clock = Clock(n, c, **clock_options)
    X = torch.from_numpy(x0.copy())
    sent = wire_type(wire, X.dtype)
    check_wire(algorithm, sent, X.dtype)
    if isinstance(sent, Narrow):
        check_memory(sent, X, algorithm.exchanged, topology, -1, 1)
    transport = StackedTransport(topology, clock, sent, late)
    runner = Plain(X, algorithm, transport, alpha)
    result = Trajectory(
        np.empty((rounds + 1, *x0.shape), x0.dtype), np.zeros(rounds + 1), np.zeros(rounds + 1)
    )

    def record(runner: Runner) -> None:
        result.X[runner.r] = X.numpy()
        result.time[runner.r] = clock.t.max()
        result.wait[runner.r] = clock.waited.mean()
        if runner.r == rounds:
            runner.stop()

    runner.on_round.append(record)
    G = torch.empty_like(X)
    x, g = X.numpy(), G.numpy()
    runner.start()
    k = 0
    while not runner.finished:
        if batched:
            g[:] = grad(x, k)  # type: ignore[call-arg, arg-type]
        else:
            for i in range(n):
                g[i] = grad(i, x[i], k)
        k += 1
        runner.advance(G)
    runner.finish()
    return result


def _check(x0: NDArray[Any], alpha: float, rounds: int) -> None:
    if x0.ndim != 2 or x0.dtype not in (np.float32, np.float64):
        raise UserError(
            f"x0 must be an (n, d) array of float32 or float64, not {x0.dtype} {x0.shape}"
        )
    if not np.isfinite(x0).all():
        raise UserError("x0 holds values that are not finite")
    if int(rounds) != rounds or rounds < 0:
        raise UserError(f"rounds must be a whole number of at least 0, not {rounds}")
    if not np.isfinite(alpha):
        raise UserError(f"alpha must be finite, not {alpha:g}")
