"""`--retune`: does tau still hide the messages? Looked at again and again during a run."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..runtime.runner import Runner
from ..transport.base import FlightRecord, Pending
from .choose import c_of, keep, kinds, with_fragments
from .loop import Training
from .measure import short
from .plan import Bounds

PATIENCE = 10  # checks


class Retuner:
    """Every so many rounds: does tau still hide the messages? Changes it on all ranks alike.

    Each rank sends what it saw at a round boundary by a reduction that nobody waits for; the sum is
    there at the next boundary, where all come to the same answer.
    """

    def __init__(self, training: Training, bounds: Bounds, every: int) -> None:
        self.training, self.bounds, self.every = training, bounds, every
        self._used = kinds(training.runner.algorithm, training.runner.transport.topology)
        self._pending: Pending | None = None
        self._boundary_s: float | None = None
        self._gradients: list[float] = []
        self._messages: list[float] = []
        self._rounds = 0  # looked at, the same number on every rank
        self._too_small = self._checks_left = self._votes_due = 0
        # Before the training's own: its checkpoint is to hold the tau of the next round.
        training.runner.observers.insert(0, self.boundary)

    def boundary(self, runner: Runner) -> None:
        now = time.perf_counter()
        if self._boundary_s is not None:
            self._rounds += 1
            self._look(runner, now - self._boundary_s)
        self._boundary_s = now
        if self._pending is not None:
            self._votes_due -= 1  # as late as other votes: who runs ahead does not wait for them
            if self._votes_due == 0:
                self._decide(runner, self._pending.result())
                self._pending = None
        elif self._rounds and runner.r % self.every == 0:
            self._pending = runner.transport.everywhere(*self.seen())
            self._votes_due = self.training.control.lag
            self._forget()

    def seen(self) -> list[float]:
        """This rank's gradient and message. The quickest quarter of messages met nobody late."""
        if not self._messages:
            return [0.0, 0.0]
        return [median(self._gradients), float(np.percentile(self._messages, 25))]

    def _look(self, runner: Runner, wall_s: float) -> None:
        flights = [f for f in runner.transport.records if f.round == runner.r - 1]
        if flights:
            tau = runner.algorithm.tau
            self._gradients.append((wall_s - sum(f.exposed for f in flights)) / tau)
            self._messages.append(_busy(flights) / sum(f.share for f in flights))

    def _forget(self) -> None:
        self._gradients, self._messages, self._rounds = [], [], 0

    def _decide(self, runner: Runner, ranks: NDArray[np.float64]) -> None:
        if not ranks[:, 0].all():
            return  # somebody has sent nothing since
        algorithm, topology = runner.algorithm, runner.transport.topology
        gradient = float(ranks[:, 0].max())
        # A quicker rank posts early and counts the wait for a slower one as transfer.
        early = algorithm.tau * (gradient - ranks[:, 0])
        message = float((ranks[:, 1] - early).max())
        c = c_of(self._used, topology.n, message, message) / max(gradient, 1e-9)
        in_parts = "fragments" in self.training.config.choice
        tuned = with_fragments(algorithm, 1) if in_parts else algorithm
        wanted, reason = keep(tuned, topology, c, self.bounds)
        tau = self.next_tau(algorithm.tau, wanted)
        if tau != algorithm.tau:
            self.training.say(
                f"round {runner.r}: tau = {tau} instead of {algorithm.tau}: a gradient "
                f"takes {short(gradient)}, a message {short(message)}; {reason}"
            )
            P = max(1, algorithm.P * tau // algorithm.tau)  # flights stay as long
            self.training.set_tau(tau, P if in_parts else None)
            self._forget()

    def next_tau(self, tau: int, wanted: int) -> int:
        """Up at once; down by a third at most, and for a while not to what was too small before.

        A network that is idle for longer between two messages may take the next one faster.
        """
        self._checks_left -= 1
        if self._checks_left <= 0:
            self._too_small = 0
        if wanted > tau:
            self._too_small, self._checks_left = tau, PATIENCE
        if wanted >= tau:
            return wanted
        return min(tau, max(wanted, 2 * tau // 3, self._too_small + 1))


def _busy(flights: list[FlightRecord]) -> float:
    """How long at least one of them was on the way."""
    total, until = 0.0, -np.inf
    for flight in sorted(flights, key=lambda f: f.posted):
        total += max(0.0, flight.completed - max(flight.posted, until))
        until = max(until, flight.completed)
    return total
