"""Virtual time for the stacked transport: what a round costs, from its schedule alone.

A gradient costs 1 unit. A model-sized message costs c on its sender's network card, which
sends one at a time; a flight is ready at agent i when the last of its neighbours' messages is
through. Nothing here knows an algorithm: round times such as max(tau, c) come out of the order
in which a schedule computes, posts and waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..topology import Topology
from .slowdown import draw

Times = NDArray[np.float64]


@dataclass
class Clock:
    """Per-agent virtual time, in units of one gradient at speed 1."""

    n: int
    c: float | Times = 1.0
    """Cost of a model-sized message: one number, or an (n, n) array of cost from j (row) to i."""
    speed: Times | None = None
    """Compute speed of each agent; 0.5 takes two units for a gradient."""
    jitter: float = 0.0
    """Relative standard deviation of every gradient's time (a seeded gamma: never negative)."""
    degree_aware: bool = False
    """Charge one message per neighbour, in turn, instead of one per exchange."""
    seed: int = 0

    def __post_init__(self) -> None:
        c = np.asarray(self.c, dtype=float)
        if c.ndim not in (0, 2) or (c.ndim == 2 and c.shape != (self.n, self.n)):
            raise UserError(f"c must be a number or an ({self.n}, {self.n}) array, not {c.shape}")
        if not np.isfinite(c).all() or (c < 0).any():
            raise UserError("c must be finite and at least 0")
        self._c = c
        speed = np.ones(self.n) if self.speed is None else np.asarray(self.speed, dtype=float)
        if speed.shape != (self.n,) or not (speed > 0).all():
            raise UserError(f"speed must be {self.n} positive numbers, one per agent")
        if not 0 <= self.jitter <= 10:
            raise UserError("jitter must be at least 0 and at most 10")
        self._gradient = 1.0 / speed
        self._random = np.random.default_rng(self.seed)
        self.t: Times = np.zeros(self.n)
        self.card_free: Times = np.zeros(self.n)  # when each network card has sent all it has
        self.waited: Times = np.zeros(self.n)

    def compute(self) -> None:
        self.t = self.t + self._gradient * draw(self._random, self.jitter, self.n)

    def post(self, topology: Topology, round: int, share: float = 1.0) -> tuple[Times, Times]:
        """Every agent starts a message to its neighbours; when posted, when ready at each agent.

        It costs the share of a model that it carries.
        """
        posted, through = self.send(topology, round, share)
        # An agent's own message must be out too: its buffer is reused after the flight.
        ready = np.maximum(self.card_free, posted)
        np.maximum.at(ready, topology.csr(round)[1], through)
        return posted, ready

    def send(self, topology: Topology, round: int, share: float = 1.0) -> tuple[Times, Times]:
        """The same, but when each message of the graph's CSR order is through."""
        indptr, indices, _ = topology.csr(round)
        degree = np.diff(indptr)
        sender = np.repeat(np.arange(self.n), degree)  # edge k goes from sender[k] to indices[k]
        start = np.maximum(self.t, self.card_free)
        cost = self._cost(sender, indices) * share
        ends = np.append(cost, 0.0)  # so that reduceat accepts a last row without edges
        if self.degree_aware:
            total = np.cumsum(cost)
            before = np.concatenate(([0.0], total))[indptr[:-1]]
            through = start[sender] + total - np.repeat(before, degree)
            busy = np.add.reduceat(ends, indptr[:-1]) * (degree > 0)
        else:
            through = start[sender] + cost
            busy = np.maximum.reduceat(ends, indptr[:-1]) * (degree > 0)
        self.card_free = start + busy
        return self.t.copy(), through

    def post_all_reduce(self) -> tuple[Times, Times]:
        """A ring all-reduce: 2(n-1) chunks of 1/n of a model, once the last agent is there."""
        posted = self.t.copy()
        i = np.arange(self.n)
        worst = float(self._cost(i, (i + 1) % self.n).max())  # all chunks pass the slowest link
        done = float(np.maximum(self.t, self.card_free).max()) + 2 * (self.n - 1) / self.n * worst
        self.card_free = np.full(self.n, done)
        return posted, self.card_free.copy()

    def wait(self, ready: Times) -> Times:
        exposed = np.maximum(ready - self.t, 0.0)
        self.t = np.maximum(self.t, ready)
        self.waited = self.waited + exposed
        return exposed

    def _cost(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> Times:
        if self._c.ndim == 0:
            return np.full(len(source), float(self._c))
        return self._c[source, target]

    def state_dict(self) -> dict[str, Any]:
        return {
            "t": self.t.tolist(),
            "card_free": self.card_free.tolist(),
            "waited": self.waited.tolist(),
            "random": self._random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = np.asarray(state["t"], dtype=float)
        self.card_free = np.asarray(state["card_free"], dtype=float)
        self.waited = np.asarray(state["waited"], dtype=float)
        self._random.bit_generator.state = state["random"]
