"""What a gradient and a message really take, for `--tau auto`, `--fragments auto`, `--retune`."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from ..runtime.runner import Runner
from ..transport.base import FlightRecord, Pending
from ..transport.device import device_of
from . import fragments_auto, tau_auto
from .fragments_auto import Cost, Fragments
from .loop import Training
from .tau_auto import Bounds, Pace

GRADIENTS, EXCHANGES = 5, 3  # measured, after one that warms up
PATIENCE = 10  # checks
LONG_S = 5.0  # no further gradients after as many seconds


def calibrate(training: Training, bounds: Bounds | None, fragments: bool = False) -> str:
    """Measure, agree, and start the run anew with what is chosen: tau within the bounds if there
    are any, then the fragments if asked. Says what and why. Collective; before round 0.

    The model, its data and its random numbers are left as they were: what follows is bit for
    bit the run with the same numbers given.
    """
    runner = training.runner
    topology, transport = runner.transport.topology, runner.transport
    if fragments:
        training.set_tau(runner.algorithm.tau, 1)
    used = tau_auto.kinds(runner.algorithm, topology)
    transport.drain()  # what the start has posted
    own = [_gradient_seconds(training), *_message_seconds(runner, used)]
    ranks = transport.everywhere(*own).result()
    pace = Pace(*ranks.max(axis=0).tolist())
    chosen, reasons = [], []
    if bounds is not None:
        choice = tau_auto.choose(runner.algorithm, topology, pace.c(used, topology.n), bounds)
        training.set_tau(choice.tau)
        chosen.append(f"tau = {choice.tau}")
        reasons.append(choice.reason)
    if fragments:
        parts = _choose_fragments(training, pace)
        training.set_tau(runner.algorithm.tau, parts.P)
        chosen.append(f"fragments = {parts.P}")
        reasons.append(parts.reason)
        transport.drain()
        transport.free_memory()  # of messages that were as long as x
    runner.restart()
    transport.records.clear()
    slowest = int(ranks[:, 0].argmax())
    message = max(pace.exchange, pace.all_reduce)
    return (
        f"{', '.join(chosen)} chosen: a gradient takes {_short(pace.gradient)} (slowest on rank "
        f"{slowest}), {' and '.join(sorted(used)) or 'nothing'} {_short(message)}; "
        f"{'; '.join(reasons)}"
    )


def _choose_fragments(training: Training, pace: Pace) -> Fragments:
    """With the tau there is now. Collective."""
    runner, transport = training.runner, training.runner.transport
    algorithm, topology = runner.algorithm, runner.transport.topology
    most = fragments_auto.candidates(algorithm, topology)[0]
    training.set_tau(algorithm.tau, most)
    own = [_gradient_jitter(training), *_exchange_seconds(runner)]
    ranks = transport.everywhere(*own).result()
    jitter, (_, parts, stall) = float(np.sqrt(np.mean(ranks[:, 0] ** 2))), ranks.max(axis=0)
    gradient = max(pace.gradient, 1e-9)
    cost = Cost(pace.exchange / gradient, float(parts) / gradient, most, float(stall) / gradient)
    return fragments_auto.choose(algorithm, topology, cost, jitter=jitter)


def _gradient_seconds(training: Training) -> float:
    """Median of a few gradients while all ranks compute."""
    slowdown = training.slowdown  # it makes a gradient longer, never shorter
    factor = 1.0 if slowdown is None else max(1.0, slowdown.factor)
    return median(_gradients(training, GRADIENTS)) * factor


def _gradient_jitter(training: Training) -> float:
    """Relative standard deviation of some more."""
    took = np.array(_gradients(training, 2 * GRADIENTS))
    asked = training.config.jitter
    return float(np.hypot(took.std() / took.mean(), asked))


def _gradients(training: Training, count: int) -> list[float]:
    """Seconds of each, after one that warms up; buffers that they change are restored."""
    worker, transport = training.workers[0], training.runner.transport
    kept = [(buffer, buffer.clone()) for buffer in worker.model.buffers()]
    device = device_of(training.runner.x.device)
    took: list[float] = []
    transport.reduce(np.zeros(1)).result()  # all start together
    begin = time.perf_counter()
    for k in range(1 + count):
        start = time.perf_counter()
        training.backward(worker, k)
        device.synchronize()
        took.append(time.perf_counter() - start)
        if len(took) > 1 and time.perf_counter() - begin > LONG_S:
            break
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)
    return took[1:]


def _message_seconds(runner: Runner, used: set[str]) -> tuple[float, float]:
    """An exchange, as much as a whole model takes, and an all-reduce alone."""
    transport, exchange, took = runner.transport, 0.0, []
    if "exchange" in used:
        exchange, _ = _exchange_seconds(runner)
    if "all_reduce" in used:
        for _ in range(1 + EXCHANGES):
            transport.reduce(np.zeros(1)).result()
            transport.all_reduce(runner.x, 0).wait()
            transport.drain()
            took.append(transport.records[-1].transfer)
        transport.records.clear()
    return exchange, median(took[1:]) if took else 0.0


def _exchange_seconds(runner: Runner) -> tuple[float, float]:
    """What a round sends at once, as much as a whole model takes; and what of one nothing hides.

    Of a graph that changes the slowest phase.
    """
    transport = runner.transport
    phases = transport.topology.period
    took = np.zeros((1 + EXCHANGES, phases, 2))
    x = runner.cut(runner.x, runner.algorithm.P)[0]
    share = x.numel() / runner.x.numel()
    for repeat in range(1 + EXCHANGES):
        for phase in range(phases):
            transport.reduce(np.zeros(1)).result()
            start = time.perf_counter()
            transport.exchange(x, phase, share).wait()
            stood = time.perf_counter() - start
            transport.drain()
            transfer = transport.records[-1].transfer
            took[repeat, phase] = transfer / share, max(0.0, stood - transfer)
    transport.records.clear()
    transfer, stall = np.median(took[1:], axis=0).max(axis=0)
    return float(transfer), float(stall)


class Retuner:
    """Every so many rounds: does tau still hide the messages? Changes it on all ranks alike.

    Each rank sends what it saw at a round boundary by a reduction that nobody waits for; the sum is
    there at the next boundary, where all come to the same answer.
    """

    def __init__(self, training: Training, bounds: Bounds, every: int) -> None:
        self.training, self.bounds, self.every = training, bounds, every
        self._used = tau_auto.kinds(training.runner.algorithm, training.runner.transport.topology)
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
        pace = Pace(gradient, message, message)
        tuned = (
            fragments_auto.whole(algorithm) if self.training.config.auto_fragments else algorithm
        )
        choice = tau_auto.keep(tuned, topology, pace.c(self._used, topology.n), self.bounds)
        tau = self.next_tau(algorithm.tau, choice.tau)
        if tau != algorithm.tau:
            self.training.say(
                f"round {runner.r}: tau = {tau} instead of {algorithm.tau}: a gradient "
                f"takes {_short(gradient)}, a message {_short(message)}; {choice.reason}"
            )
            P = max(1, algorithm.P * tau // algorithm.tau)  # flights stay as long
            self.training.set_tau(tau, P if self.training.config.auto_fragments else None)
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


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
