"""What may befall a job while it runs, and when.

A fault waits for its phase of this job, then a random while, then strikes:

    start     from the launch on: imports, MPI_Init, reading a checkpoint
    begun     the run's folder has been taken
    round     a checkpoint of this job is complete
    save      a checkpoint is being written
    closing   the last checkpoint is complete
    summary   summary.json is written
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.store import MANIFEST, folder_name, newest_first
from . import damage
from .job import Job, waited

PHASES = {"start": 0.0, "begun": 0.3, "round": 0.3, "save": 4e-3, "closing": 0.05, "summary": 0.1}
"""The longest random while after each."""
ENDING = (
    "kill", "kill-0", "kill-launcher", "kill-proxy", "term", "usr1", "term-launcher",
    "int-launcher", "freeze",
)  # fmt: skip
NEED_FILES = ("full-disk", "full-then-room", "checkpoints-away")
PASSING = ("pause", "pause", "pause-all", *NEED_FILES)
SIGNALS = {
    "kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1,
    "freeze": signal.SIGSTOP,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    kind: str
    phase: str
    delay_s: float
    which: float
    """From 0 to 1: which rank."""
    length_s: float
    """Of a pause, or until there is room again."""


def draw(chance: random.Random, start_s: float) -> list[Fault]:
    """Of one job, in the order in which they strike; a job that is to end does so by the last."""
    kind = chance.choice((*ENDING, *PASSING))
    phase, order = _phase(chance, kind), list(PHASES)
    drawn = [(kind, phase)]
    if phase == "start":
        drawn = [("pause", "start")] * chance.randint(0, 1) + drawn
    else:  # a job costs seconds, mostly to start; what does not end it costs little
        for _ in range(chance.randint(3, 9)):
            before = order[: order.index(drawn[0][1]) + 1]
            drawn.insert(0, (chance.choice(PASSING), chance.choice(before)))
    made = [_fault(chance, kind, phase, start_s) for kind, phase in drawn]
    return sorted(made, key=lambda fault: order.index(fault.phase))


def _fault(chance: random.Random, kind: str, phase: str, start_s: float) -> Fault:
    if phase == "start" and kind in NEED_FILES:
        phase = "begun"
    delay_s = chance.uniform(0, PHASES[phase] or start_s)
    return Fault(kind, phase, delay_s, chance.random(), chance.uniform(0.01, 0.4))


def _phase(chance: random.Random, kind: str) -> str:
    if kind == "freeze":  # MPI's own start and end have limits of a minute and half of one
        weights = (1, 0, 30, 12, 1, 1)
    else:
        weights = (4, 2, 5, 5, 2, 2)
    return chance.choices(list(PHASES), weights)[0]


class Watch:
    """Sees from the folder in which phase this job is."""

    def __init__(self, run: Path, last_round: int) -> None:
        self.run, self._last = run, folder_name(last_round)
        self._stamps = {name: self._stamp(name) for name in ("config.json", "summary.json")}
        self._before = {folder.name for folder in damage.complete(run)}

    def reached(self, phase: str) -> bool:
        if phase == "start":
            return True
        new = self._stamp("config.json") not in (None, self._stamps["config.json"])
        if phase == "begun" or not new:
            return new
        if phase == "summary":
            return self._stamp("summary.json") not in (None, self._stamps["summary.json"])
        try:
            found = {p.name: (p / MANIFEST).exists() for p in newest_first(self.run)}
        except OSError:
            return False
        if phase == "save":
            return not all(found.values())
        if phase == "closing":
            return found.get(self._last, False)
        return any(whole and name not in self._before for name, whole in found.items())

    def _stamp(self, name: str) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            state = (self.run / name).lstat()
            return state.st_ino, state.st_mtime_ns
        return None


class Striker:
    """Of one job: waits for the phases, strikes, and undoes what must not stay."""

    def __init__(self, job: Job, watch: Watch, limit_s: float) -> None:
        self.job, self.watch, self.limit_s = job, watch, limit_s
        self.struck: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def strike(self, fault: Fault) -> None:
        """Unless the job has ended, or there is nothing to strike any more."""
        job = self.job
        waited(lambda: job.code is not None or self.watch.reached(fault.phase), self.limit_s)
        waited(lambda: job.code is not None, fault.delay_s)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if job.code is None and self._act(fault):
                self.struck.append({"kind": fault.kind, "phase": fault.phase})

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _act(self, fault: Fault) -> bool:
        job = self.job
        if fault.kind.endswith("-launcher"):
            job.launcher.send_signal(SIGNALS[fault.kind.removesuffix("-launcher")])
            return True
        if fault.kind == "checkpoints-away":
            if self._undo:
                return False  # they are away already
            self._undo.append(damage.away(self.watch.run))
            return True
        if not waited(lambda: job.code is not None or job.ranks(), 60, 0.02):
            return False
        ranks = job.ranks()
        pids = [ranks[rank] for rank in sorted(ranks)]
        if not pids:
            return False
        if fault.kind == "kill-proxy":
            proxy = job.proxy()
            os.kill(proxy if proxy is not None else job.launcher.pid, signal.SIGKILL)
        elif fault.kind.startswith("pause"):
            self._pause(pids if fault.kind == "pause-all" else [_one(pids, fault)], fault)
        elif fault.kind.startswith("full"):
            self._fill(pids if fault.which < 0.3 else [_one(pids, fault)], fault)
        else:
            pid = pids[0] if fault.kind == "kill-0" else _one(pids, fault)
            os.kill(pid, SIGNALS[fault.kind.removesuffix("-0")])
        return True

    def _pause(self, pids: list[int], fault: Fault) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        waited(lambda: self.job.code is not None, fault.length_s)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def _fill(self, pids: list[int], fault: Fault) -> None:
        """No file of these ranks grows beyond a few bytes; for a while, or to the job's end."""
        least = (0, 500, 2000)[int(fault.which * 100) % 3]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (least, hard))
        if fault.kind == "full-then-room":
            waited(lambda: self.job.code is not None, fault.length_s)
            for pid, limit in limits.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def _one(pids: list[int], fault: Fault) -> int:
    return pids[min(int(fault.which * len(pids)), len(pids) - 1)]
