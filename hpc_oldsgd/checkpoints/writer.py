"""Checkpoints: one file per rank, and a manifest that makes them valid, written last.

A snapshot is taken at a round boundary and written by a thread during the next rounds. Each vote
says who is still writing; when nobody is, the checksums travel to rank 0 by a nonblocking
reduction, and its thread writes the manifest. A checkpoint counts only once the round after it
has gone well, so that none of a run that has just diverged replaces a good one. The first is of
the start, so that there is always one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..files import sync_folder
from ..runtime import part_file
from ..runtime.part_file import Written
from ..runtime.votes import Control
from ..transport.base import Pending, Transport
from .store import (
    FORMAT,
    MANIFEST,
    folder_of,
    newest_first,
    part_name,
    prune,
    remove,
    write_manifest,
)

COLUMNS = 10  # of the report: problem, bytes, eight words of the checksum
PIECE = 1 << 20  # numbers looked at together, so that no model-sized temporary is made
NOT_FINITE = 1 << 20  # no errno


@dataclass(frozen=True)
class Policy:
    every: int = 0
    """Rounds between two checkpoints; 0 for none by count."""
    seconds: float = 0.0
    """Seconds between two checkpoints; 0 for none by time."""
    keep: int = 2


@dataclass
class Saving:
    """One checkpoint under way."""

    r: int
    t: int
    written: Future[Written]
    tau: int | None = None
    report: Pending | None = None


class Checkpoints:
    """Saves a run. Every rank makes one and calls the same methods at the same boundaries."""

    def __init__(
        self,
        run: Path,
        transport: Transport,
        control: Control,
        policy: Policy,
        *,
        part: int,
        count: int,
        about: dict[str, Any],
        last: Path | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """This process writes part `part` of `count`; `about` goes into the manifest.

        `last` is the checkpoint of this folder that the run goes on from.
        """
        self.run, self.policy, self.about = run, policy, about
        self.part, self.count = part, count
        self.last = last
        """The newest valid one; known where part 0 is written."""
        self.problem = ""
        """Why the last one that was lost was lost."""
        self.messages: list[str] = []
        """For the user, from part 0; the caller takes them."""
        self._transport, self._control, self._before_commit = transport, control, before_commit
        self._saving: Saving | None = None
        self._commit_done: Future[None] | None = None
        self._wanted = self._asked = False
        self._last_s = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    # -- at a boundary -------------------------------------------------------------------------

    def cast_wishes(self) -> None:
        """Before the boundary's vote."""
        saving = self._saving
        if saving is not None and not saving.written.done():
            self._control.wish("writing")
        due = self.part == 0 and 0 < self.policy.seconds <= time.monotonic() - self._last_s
        if due and not self._asked:  # once: the next vote may come before this one is counted
            self._control.wish("checkpoint")
            self._asked = True

    def ask(self) -> None:
        """Ask for a checkpoint at the next boundary. All ranks must call it."""
        self._wanted = True

    def wanted(self, r: int, decided: set[str]) -> bool:
        """After the vote: whether to `save` now. The run's last boundary is saved in any case."""
        saving = self._saving
        if saving is not None:
            if saving.report is not None:
                self._commit(saving)
            # The first vote that knows of the thread was cast a round after the snapshot.
            elif "writing" not in decided and r >= saving.r + 1 + self._control.known_after:
                self._report_of(saving)
        due = self.policy.every and r % self.policy.every == 0
        self._wanted |= bool(due) or "checkpoint" in decided
        return self._wanted and self._saving is None

    def save(self, r: int, t: int, state: dict[str, Any]) -> None:
        """Copies the state, then writes the copy in the background. Collective.

        Blocks if the one before is still under way, as it may be at the run's last boundary.
        """
        self._complete()
        self._wanted, self._asked, self._last_s = False, False, time.monotonic()
        copied = part_file.snapshot(state)
        self._saving = Saving(
            r, t, self._thread.submit(self._write, folder_of(self.run, r), copied), state.get("tau")
        )

    def settle(self) -> None:
        """Complete what is under way, on the disk too. Collective, blocking."""
        self._complete()
        if self._commit_done is not None:
            self._commit_done.result()

    def finish(self) -> None:
        """`settle`, and no more checkpoints after it."""
        self.settle()
        self._thread.shutdown()

    def diverged(self, r: int) -> None:
        """Keep what is under way only if the round after it was good; the start always is."""
        saving = self._saving
        if saving is not None and saving.r > max(0, r - 2 - self._control.known_after):
            self._report_of(saving).result()  # all have written it
            self._saving = None
            if self.part == 0:
                remove(folder_of(self.run, saving.r))
        self.finish()

    def reject(self, r: int) -> None:
        """Round r's, the last, turned out to be bad: go back to the one before, if there is one."""
        bad = folder_of(self.run, r)
        older = [p for p in newest_first(self.run) if p != bad and (p / MANIFEST).is_file()]
        if self.part == 0 and self.last == bad and older:
            remove(bad)
            self.last = older[0]

    # -- after the loss of an agent ------------------------------------------------------------

    def abandon(self) -> None:
        """Give up what is under way, once this process no longer writes any of it."""
        if self._saving is not None:
            self._saving.written.exception()
        if self._commit_done is not None:
            self._commit_done.exception()
        self._saving = None

    def forget(self, r: int) -> None:
        """Remove what there is of round r: it will be saved anew, by fewer."""
        remove(folder_of(self.run, r))
        if self.last == folder_of(self.run, r):
            self.last = None

    def regroup(self, part: int, count: int, about: dict[str, Any]) -> None:
        """This process writes another part from now on; the first checkpoint is due at once."""
        self.part, self.count, self._wanted = part, count, True
        self.about = {**self.about, **about}

    # -- inside --------------------------------------------------------------------------------

    def _write(self, folder: Path, state: dict[str, Any]) -> Written:
        start = time.perf_counter()
        pieces = state["runner"]["x"].view(-1).split(PIECE)
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            raise OSError(NOT_FINITE, "the model is not finite")
        folder.mkdir(parents=True, exist_ok=True)
        written = part_file.write(folder / part_name(self.part), state)
        if self._transport.trace is not None:
            now = time.perf_counter()
            self._transport.trace.span("checkpoint", "write", start, now, bytes=written.bytes)
        return written

    def _report(self, saving: Saving) -> NDArray[np.float64]:
        """How writing went, in this process's row; zeros elsewhere, to be summed."""
        table = np.zeros((self.count, COLUMNS))
        row = table[self.part]
        error = saving.written.exception()
        if error is None:
            written = saving.written.result()
            row[1] = written.bytes
            row[2:] = np.frombuffer(bytes.fromhex(written.sha256), dtype=">u4")
        else:
            row[0] = getattr(error, "errno", None) or -1
        return table.ravel()

    def _report_of(self, saving: Saving) -> Pending:
        """The reports of all ranks, under way. Waits for this process's thread."""
        if saving.report is None:
            saving.report = self._transport.reduce(self._report(saving), "sum")
        return saving.report

    def _complete(self) -> None:
        if self._saving is not None:
            self._commit(self._saving)

    def _commit(self, saving: Saving) -> None:
        """Blocks if the report has not arrived or not been asked for yet."""
        table = self._report_of(saving).result().reshape(self.count, COLUMNS)
        self._saving = None
        if self.part != 0:
            return
        failed = [k for k in range(self.count) if table[k, 0]]
        if failed:
            self._lost(saving.r, failed[0], int(table[failed[0], 0]))
            self._commit_done = self._thread.submit(remove, folder_of(self.run, saving.r))
            return
        files = [
            {
                "file": part_name(k),
                "bytes": int(row[1]),
                "sha256": row[2:].astype(">u4").tobytes().hex(),
            }
            for k, row in enumerate(table)
        ]
        manifest = {"format": FORMAT, "round": saving.r, "iteration": saving.t, "tau": saving.tau,
                    "time": time.time(), "shards": files, **self.about}  # fmt: skip
        self._commit_done = self._thread.submit(self._write_manifest, saving.r, manifest)

    def _write_manifest(self, r: int, manifest: dict[str, Any]) -> None:
        folder = folder_of(self.run, r)
        try:
            self._before_commit()  # rows of the rounds before it reach the disk first
            write_manifest(folder, manifest)
            sync_folder(folder.parent)
        except OSError as error:
            self._lost(r, 0, error.errno or -1)
            with contextlib.suppress(OSError):
                remove(folder)  # it would keep the disk full
            return
        self.last = folder
        with contextlib.suppress(OSError):  # one old checkpoint too many does no harm
            prune(self.run, self.policy.keep)

    def _lost(self, r: int, part: int, problem: int) -> None:
        if problem == NOT_FINITE:
            why = "the model is not finite"
        else:
            why = os.strerror(problem) if problem > 0 else "writing failed"
        where = f"rank {part}: " if self.count > 1 else ""
        self.problem = where + why
        still = f"the last valid one is {self.last.name}" if self.last else "there is none yet"
        self.messages.append(
            f"warning: no checkpoint of round {r} ({self.problem}); the run goes on, {still}"
        )
