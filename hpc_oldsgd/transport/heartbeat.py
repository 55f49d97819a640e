"""What every rank is doing, for the ranks that wait for it: RUN/status/rank-00003.json.

A file, because a process that is stopped or hung answers no message, while what it wrote last can
still be read. A thread writes it, a few times within --timeout, so the training loop pays two
assignments; the run's folder is shared by all ranks already, for the checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = "status"
SIZE_BYTES = 1024  # written in place and in one piece: no rename, no moment in which it is empty
BEATS = 20  # within the time limit
SLOWEST_BEAT_S = 10.0


@dataclass
class Status:
    """Of one rank; its own thread changes it, the board's thread reads it."""

    what: str = "starting"
    round: int = 0
    waits_for: str = ""
    since: float = field(default_factory=time.time)
    """Seconds of the wall clock: other hosts read it."""
    reductions: int = 0
    """Votes and sums over all ranks that this one has joined."""
    host: str = platform.node()
    beat: float = 0.0

    def set(self, what: str) -> None:
        self.since, self.what = time.time(), what

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        before = self.what
        self.set(what)
        yield
        self.set(before)  # after an error it stays: that is what is reported

    def waits(self, whom: str, seconds: float) -> None:
        if not self.waits_for:
            self.since = time.time() - seconds
        self.waits_for = whom

    def describe(self, now: float) -> str:
        text = f"{self.what} in round {self.round}"
        if self.waits_for:
            text += f", waiting for {self.waits_for}"
        return f"{text} (for {max(0.0, now - self.since):.0f} s)"


class Board:
    """Everybody's status, through files in the run's folder."""

    def __init__(self, run: Path, rank: int, n: int, status: Status, timeout_s: float) -> None:
        self.folder, self.rank, self.n, self.status = run / FOLDER, rank, n, status
        self.beat_s = min(SLOWEST_BEAT_S, timeout_s / BEATS)
        self._stopping = threading.Event()
        with contextlib.suppress(OSError):  # without it late ranks are named, not explained
            self.folder.mkdir(exist_ok=True)
        self.write()
        self._thread = threading.Thread(target=self._loop, name="status", daemon=True)
        self._thread.start()

    def write(self) -> None:
        self.status.beat = time.time()
        line = json.dumps(asdict(self.status)).encode().ljust(SIZE_BYTES - 1) + b"\n"
        with contextlib.suppress(OSError):
            # Closed every time: a network file system shows it to the other hosts only then.
            handle = os.open(self._path(self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(handle, line[:SIZE_BYTES])
            finally:
                os.close(handle)

    def read(self) -> list[Status | None]:
        found: list[Status | None] = []
        for j in range(self.n):
            try:
                found.append(Status(**json.loads(self._path(j).read_bytes())))
            except (OSError, ValueError, TypeError):
                found.append(None)
        return found

    def late(self, reduction: int) -> list[int]:
        """Ranks that had not joined it when they were last heard of, or fell silent since."""
        now = time.time()
        return [
            j
            for j, s in enumerate(self.read())
            if s is None or s.reductions < reduction or self._silent(s, now)
        ]

    def everybody(self) -> str:
        """A line for each rank; nothing if another rank has said it already."""
        self.write()
        try:
            os.close(os.open(self.folder / "reported", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return ""
        except OSError:
            pass
        now, lines = time.time(), []
        for j, status in enumerate(self.read()):
            text = "nothing is known" if status is None else status.describe(now)
            if status is not None and self._silent(status, now):
                text += f"; silent for {now - status.beat:.0f} s: stopped, or its host is"
            host = "" if status is None else f" ({status.host})"
            lines.append(f"  rank {j}{host}: {text}")
        return "\n".join(["what every rank was doing:", *lines])

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _silent(self, status: Status, now: float) -> bool:
        return now - status.beat > 3 * self.beat_s + 0.5

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def _loop(self) -> None:
        while not self._stopping.wait(self.beat_s):
            self.write()


def clear(run: Path) -> None:
    """What an earlier job has left; never through a link."""
    folder = run / FOLDER
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """rank 1 (node07), 4 (node09)"""
    shown = [f"{j} ({hosts[j]})" for j in ranks[:8]] + ["..."] * (len(ranks) > 8)
    return f"rank {', '.join(shown)}"
