"""What all agents must agree on, without a stall: each round's vote is counted at the next.

Every agent casts its wishes at a round boundary by a nonblocking maximum over all; the result is
read one boundary later, when it has long arrived, so everybody acts at the same round.
"""

from __future__ import annotations

import numpy as np

from .transport.base import Pending, Transport

WISHES = ("stop", "checkpoint", "diverged", "not_ready", "writing")


class Control:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._wishes: set[str] = set()
        self._pending: Pending | None = None

    def wish(self, what: str) -> None:
        """Ask for it at the next vote. Safe from a signal handler."""
        assert what in WISHES
        self._wishes.add(what)

    def boundary(self) -> set[str]:
        """What the last vote decided, on every agent alike; then the next vote starts."""
        decided: set[str] = set()
        if self._pending is not None:
            counted = self._pending.result()
            decided = {w for w, votes in zip(WISHES, counted, strict=True) if votes > 0}
        wishes, self._wishes = self._wishes, set()
        votes = np.array([float(w in wishes) for w in WISHES])
        self._pending = self._transport.reduce(votes, "max")
        return decided

    def close(self) -> None:
        """Complete the vote under way. Collective."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
