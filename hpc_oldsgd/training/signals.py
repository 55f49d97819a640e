"""Signals as requests that the training loop takes to the next vote.

SIGUSR1 asks for a checkpoint, and to stop unless told to continue; SIGTERM asks to stop. One rank
that gets the signal is enough. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


class Inbox:
    def __init__(self, on_usr1: str = "stop", ends_with_parent: bool = False) -> None:
        """`ends_with_parent`: the end of the launcher's process that started this one asks to
        stop too, since nobody watches the run any more."""
        self.on_usr1 = on_usr1
        self._parent = os.getppid() if ends_with_parent else None
        self._asked: set[str] = set()

    def install(self) -> None:
        """From the main thread only."""
        signal.signal(signal.SIGUSR1, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def take(self) -> set[str]:
        """What was asked for since the last call."""
        asked, self._asked = self._asked, set()
        orphaned = self._parent is not None and os.getppid() != self._parent
        return asked

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._asked.add("stop")
        else:
            self._asked.add("stop" if self.on_usr1 == "stop" else "checkpoint")
