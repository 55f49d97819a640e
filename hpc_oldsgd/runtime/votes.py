"""What all agents must agree on, without a stall: each round's vote is counted at the next.

Every agent casts its wishes at a round boundary by a nonblocking maximum over all; the result is
read `lag` boundaries later, one unless agents may run ahead of each other, when it has long
arrived, so everybody acts at the same round.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ..transport.base import Pending, Transport

WISHES = ("stop", "checkpoint", "diverged", "not_ready", "writing")


class Control:
    def __init__(self, transport: Transport, lag: int = 1) -> None:
        self.lag = lag
        self.late = 0
        """Boundaries after its round at which a loss is known: one more where a device is read."""
        self._transport = transport
        self._wishes: set[str] = set()
        self._pending: deque[Pending] = deque()

    @property
    def known_after(self) -> int:
        """Boundaries from the end of a round to when all know whether its losses were good."""
        return self.lag + self.late

    def wish(self, what: str) -> None:
        """Ask for it at the next vote. Safe from a signal handler."""
        assert what in WISHES
        self._wishes.add(what)

    def boundary(self) -> set[str]:
        """What the vote of `lag` boundaries ago decided, on every agent alike; starts the next."""
        decided = self._count() if len(self._pending) == self.lag else set()
        wishes, self._wishes = self._wishes, set()
        votes = np.array([float(w in wishes) for w in WISHES])
        self._pending.append(self._transport.reduce(votes, "max"))
        return decided

    def drop(self) -> None:
        """Forget the votes under way: somebody who took part in them is gone."""
        self._pending.clear()

    def settle(self) -> set[str]:
        """What all open votes decided, the one just cast too: at the end. Collective, blocking."""
        decided: set[str] = set()
        while self._pending:
            decided |= self._count()
        return decided

    def _count(self) -> set[str]:
        with self._transport.status.doing("voting"):
            counted = self._pending.popleft().result()
        return {w for w, votes in zip(WISHES, counted, strict=True) if votes > 0}
