"""One run in one folder: struck, damaged, resumed to its end, and compared."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import damage, faults
from .cases import Case
from .compare import difference, newest
from .job import Job, waited

TRAIN = ("-m", "hpc_oldsgd.train")
SHORT_TIMEOUT = ("--timeout", "5")  # of a job that a rank is missing or frozen in
MOST_JOBS = 40
STARTS = ("other-options", "exits-early", "never-comes")
"""How the last rank of a job is not like the others. The last kind takes a minute."""


@dataclass
class Life:
    """What was done to a run, and what became of it."""

    struck: list[dict[str, Any]] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    lost: str = ""
    """What did not hold; nothing if all did."""


@dataclass(frozen=True)
class Reference:
    """The run that was left alone."""

    folder: Path
    last_round: int
    start_s: float


class Ward:
    """Runs of one case, one after the other, each compared with the same reference."""

    def __init__(self, case: Case, folder: Path, mpirun: str, limit_s: float) -> None:
        self.case, self.folder, self.mpirun, self.limit_s = case, folder, mpirun, limit_s
        self._jobs = 0

    def words(self, run: Path, *more: str) -> list[str]:
        return [*TRAIN, *self.case.words, "--resume", "auto", "--out", str(run), *more]

    def start(self, run: Path, *more: str, last: list[str] | None = None) -> Job:
        """`last`: what the last rank runs instead."""
        self._jobs += 1
        words, n = self.words(run, *more), self.case.n
        groups = [(n, words)] if last is None else [(n - 1, words), (1, last)]
        return Job(self.mpirun, groups, self.folder / f"job-{self._jobs:03d}.txt")

    def reference(self) -> tuple[Reference | None, str]:
        """None and no word if the run diverges: nothing can be compared with it."""
        run, start = self.folder / "whole", time.monotonic()
        job = self.start(run)
        try:
            watch = faults.Watch(run, 0)
            waited(lambda: job.code is not None or watch.reached("begun"), self.limit_s)
            start_s = time.monotonic() - start
            in_time = job.ended(self.limit_s, run)
        finally:
            job.kill()
        if job.code == 3:
            return None, ""
        if not in_time or job.code:
            return None, f"the run that was left alone ended with {job.code}: {job.text[-300:]}"
        return Reference(run, newest(run).r, start_s), ""

    def live(self, whole: Reference, chance: random.Random, budget: int, name: str) -> Life:
        """From a new folder to a complete run, with about `budget` faults or fewer."""
        run, life = self.folder / name, Life()
        while not life.lost and len(life.codes) < MOST_JOBS:
            calm = len(life.struck) >= budget
            if not calm:
                self._between(run, chance, life)
            if life.lost or self._job(run, whole, chance, calm, life):
                break
        else:
            life.lost = life.lost or f"not complete after {MOST_JOBS} jobs"
        if not life.lost:
            rows_lost = any(one["kind"].startswith("metrics-") for one in life.struck)
            life.lost = difference(whole.folder, run, rows_lost)
            shutil.rmtree(run)
        return life

    # -- between jobs --------------------------------------------------------------------------

    def _between(self, run: Path, chance: random.Random, life: Life) -> None:
        for kind in chance.sample(damage.HARMLESS, chance.randint(0, 4)):
            if damage.harm(run, kind, chance):
                life.struck.append({"kind": kind, "phase": "between"})
        if chance.random() < 0.05:
            kind = chance.choice(damage.REFUSED)
            undo = damage.refuse(run, kind, chance)
            if undo is not None:
                self._refused(run, kind, life, {2})
                if not life.lost:
                    undo()
        if chance.random() < 0.05:
            kind = chance.choices(STARTS, (6, 6, 1))[0]
            last = {
                "other-options": self.words(run, "--alpha", "0.0123"),
                "exits-early": ["-c", "raise SystemExit(3)"],
                "never-comes": ["-c", "pass"],
            }[kind]
            self._refused(run, kind, life, {2} if kind == "other-options" else set(), last)

    def _refused(
        self, run: Path, kind: str, life: Life, codes: set[int], last: list[str] | None = None
    ) -> None:
        """A job that must end without a change of the folder, with one of these codes if any."""
        life.struck.append({"kind": kind, "phase": "start"})
        before = damage.contents(run)
        job = self.start(run, *SHORT_TIMEOUT, last=last)
        try:
            in_time = job.ended(self.limit_s, run)
        finally:
            job.kill()
        life.codes.append(job.code)
        if not in_time:
            life.lost = f"after {kind} the job did not end"
        elif job.code == 0 or (codes and job.code not in codes):
            life.lost = f"after {kind} the job ended with {job.code}: {job.text[-300:]}"
        elif "Traceback" in job.text:
            life.lost = f"after {kind} there was a traceback: {job.text[-1000:]}"
        elif damage.contents(run) != before:
            life.lost = f"after {kind} the job that was refused changed the folder"

    # -- a job ---------------------------------------------------------------------------------

    def _job(
        self, run: Path, whole: Reference, chance: random.Random, calm: bool, life: Life
    ) -> bool:
        """Whether the run is complete."""
        planned = [] if calm else faults.draw(chance, whole.start_s)
        freezes = any(fault.kind == "freeze" for fault in planned)
        more = SHORT_TIMEOUT if freezes else ()
        watch = faults.Watch(run, whole.last_round)
        jobs = [self.start(run, *more)]
        striker = faults.Striker(jobs[0], watch, self.limit_s)
        try:
            if not calm and chance.random() < 0.08:
                jobs.append(self.start(run))
                striker.struck.append({"kind": "second-job", "phase": "start"})
            for fault in planned:
                striker.strike(fault)
            in_time = [job.ended(self.limit_s, run) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
            striker.undo()
        life.struck += striker.struck
        life.codes += [job.code for job in jobs]
        kinds = {one["kind"] for one in striker.struck}
        for job, ended in zip(jobs, in_time, strict=True):
            known = kinds if job is jobs[0] else kinds & {*faults.NEED_FILES, "second-job"}
            life.lost = life.lost or judge(job.code, job.text, known, ended, freezes)
        return any(job.code == 0 for job in jobs)


def judge(code: int | None, text: str, kinds: set[str], ended: bool, short_timeout: bool) -> str:
    """What a job did that nothing which befell it explains."""
    if not ended:
        return f"after {_told(kinds)} the job, or a process of it, did not end: {text[-300:]}"
    if "Traceback" in text and "KeyboardInterrupt" not in text:
        return f"after {_told(kinds)} there was a traceback: {text[-1500:]}"
    allowed = {0}
    if kinds & set(faults.NEED_FILES):
        allowed.add(5)
    if "second-job" in kinds:
        allowed.add(2)
    if short_timeout:
        allowed.add(4)
    if "int-launcher" in kinds and "Interrupt (signal 2)" in text:
        allowed.add(2)  # MPICH's launcher ends with the number of the signal that ended a rank
    never = {2, 3, 4, 5} - allowed
    # The limit on a rank's files holds for shared memory too: MPI may not start under it.
    no_memory = bool(kinds & set(faults.NEED_FILES)) and "File too large" in text
    hard = bool(kinds & set(faults.ENDING)) or (no_memory and "MPI_Init" in text)
    if code in allowed or (hard and code not in never):
        return ""
    return f"after {_told(kinds)} the job ended with {code}: {text[-300:]}"


def _told(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds)) or "no fault"
