"""Agents made slow on purpose: by a factor of their own, and by jitter of every gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

POLL_S = 1e-3


def slowdowns(slow: Sequence[str], n: int) -> list[float]:
    """AGENT:FACTOR, ... as a factor for each of the n agents."""
    factors = [1.0] * n
    for text in slow:
        agent, _, factor = text.partition(":")
        try:
            i, value = int(agent), float(factor)
        except ValueError:
            raise UserError(f"--slow takes AGENT:FACTOR, as in 3:2.5, not {text!r}") from None
        if not 0 <= i < n or not 0 < value < float("inf"):
            raise UserError(
                f"--slow {text}: the agent must be 0 to {n - 1}, the factor positive and finite"
            )
        factors[i] = value
    return factors


def check_jitter(jitter: float) -> None:
    if not 0 <= jitter <= 10:
        raise UserError(f"--jitter must be at least 0 and at most 10, not {jitter:g}")


def draw(random: np.random.Generator, jitter: float, n: int) -> NDArray[np.float64]:
    """How many times its own time each agent's next gradient takes: a gamma of mean 1."""
    if jitter <= 1e-9:  # less cannot be seen, and its square not be divided by
        return np.ones(n)
    shape = jitter**-2
    return random.gamma(shape, 1 / shape, n)


class Drag:
    """One rank's slowness over MPI, with the draws that the simulator makes of the same seed.

    A real gradient can be made longer, never shorter: draws below its own time leave it as it is.
    """

    def __init__(
        self,
        slow: Sequence[str],
        jitter: float,
        seed: int,
        n: int,
        rank: int,
        poll: Callable[[], None] | None = None,
    ) -> None:
        """`poll` is called about every millisecond, where no thread moves the messages."""
        self.slowdown = slowdowns(slow, n)[rank]
        self._jitter, self._n, self._rank = jitter, n, rank
        self._random = np.random.default_rng(seed)
        self.any = bool(slow) or jitter > 0
        self.poll = poll

    def factor(self) -> float:
        """Of the next gradient."""
        return self.slowdown * float(draw(self._random, self._jitter, self._n)[self._rank])

    def after(self, seconds: float) -> None:
        """A gradient has taken `seconds`: sleep until it has taken as long as it should."""
        if self.any:
            pause(seconds * (self.factor() - 1), self.poll)


def pause(seconds: float, poll: Callable[[], None] | None = None) -> None:
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left if poll is None else min(left, POLL_S))
        if poll is not None:
            poll()
