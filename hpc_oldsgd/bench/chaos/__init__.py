"""Random faults against random runs: nothing may be lost.

A run is drawn (algorithm, optimizer, graph, fragments, wire, 2 or 3 ranks) and left alone once.
Then the same run is made in other folders, where its jobs are killed, signalled, paused, frozen,
refused room on the disk, started twice or started wrongly, and its files are damaged in between.
It is resumed with `--resume auto` until it is complete, and must have ended with the bits of the
run that was left alone. Every job must end in time, with a code that what befell it explains, and
without a traceback.

Which faults meet which run follows from --seed; at which step they strike, from the machine too.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ...cli.fields import at_least
from ...errors import UserError
from ...files import lock
from . import cases
from .job import check_not_stopped, stop_all
from .lives import Ward

LOG = "chaos.jsonl"
JOB_S = 900.0  # without a sign of life; the limit on MPI's start is --timeout, 600 s


@dataclass(frozen=True)
class Options:
    """Kills, signals, full disks and damaged files against MPI runs that must lose nothing."""

    faults: int = 300
    """How many in all."""
    per_run: int = 40
    """Faults against one drawn run; each drawn run is first made once without any."""
    jobs: int = 1
    """Drawn runs at a time."""
    seed: int = 0
    """Of the runs and the faults."""
    out: Path = Path("runs/chaos")
    """Folder for the runs; started again with the same one, the command goes on."""
    mpirun: str = ""
    """The launcher with its own options; the one beside python, or the one in PATH."""
    json: bool = False
    """Print one line of JSON after the text."""

    def __post_init__(self) -> None:
        at_least(1, self, "faults", "per_run", "jobs")


def main(options: Options) -> int:
    signal.signal(signal.SIGTERM, _interrupt)  # so that no process is left behind
    options.out.mkdir(parents=True, exist_ok=True)
    with lock(options.out / ".chaos.lock"):
        lives = run(options, launcher(options.mpirun))
    verdict = count(lives)
    print(text(verdict))
    (options.out / "summary.json").write_text(json.dumps(verdict, indent=2) + "\n")
    if options.json:
        print(json.dumps({"options": {**asdict(options), "out": str(options.out)}, **verdict}))
    return 1 if verdict["lost"] else 0


def run(options: Options, mpirun: str) -> list[dict[str, Any]]:
    """The lives of all runs, those of an earlier call with the same folder too."""
    log, start = options.out / LOG, time.monotonic()
    lives = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if any(life["seed"] != options.seed for life in lives):
        raise UserError(f"{log} is of another --seed: choose another --out")
    numbers = itertools.count(max((life["case"] for life in lives), default=-1) + 1)
    one_at_a_time = threading.Lock()

    def left() -> int:
        return options.faults - sum(len(life["struck"]) for life in lives)

    def work() -> None:
        while left() > 0:
            with one_at_a_time:
                k = next(numbers)
                chance = random.Random(f"{options.seed}.{k}")
                case = cases.draw(chance)
            for life in _case(options, mpirun, k, case, chance, min(options.per_run, left())):
                with one_at_a_time:
                    check_not_stopped()  # by an error of another worker: jobs were killed
                    lives.append({"seed": options.seed, "case": k, **life})
                    with log.open("a") as file:
                        file.write(json.dumps(lives[-1]) + "\n")
                    print(progress(lives, options.faults, time.monotonic() - start), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        workers = [pool.submit(work) for _ in range(options.jobs)]
        try:
            for worker in as_completed(workers):
                worker.result()
        except BaseException:
            stop_all()  # or the others would go on for long
            raise
    return lives


def progress(lives: list[dict[str, Any]], wanted: int, seconds: float) -> str:
    tried = sum(len(life["struck"]) for life in lives)
    lost, last = sum(bool(life["lost"]) for life in lives), lives[-1]
    line = (
        f"[{seconds:6.0f} s] {tried}/{wanted} faults, {lost} lost; run {last['case']}: "
        f"{last['run']}: {', '.join(one['kind'] for one in last['struck'])}"
    )
    return f"{line}\n  LOST: {last['lost']}" if last["lost"] else line


def _case(
    options: Options,
    mpirun: str,
    k: int,
    case: cases.Case,
    chance: random.Random,
    budget: int,
) -> Iterator[dict[str, Any]]:
    """The lives of one drawn run, until they have met `budget` faults."""
    folder = options.out / f"run-{k:04d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ward = Ward(case, folder, mpirun, JOB_S)
    whole, problem = ward.reference()
    if problem:
        yield {"run": str(case), "struck": [], "codes": [], "lost": problem}
    number = 0
    while whole is not None and budget > 0:
        life = ward.live(whole, chance, budget, f"life-{number}")
        budget -= max(1, len(life.struck))
        number += 1
        problem = problem or life.lost
        yield {"run": str(case), **asdict(life)}
    if not problem:  # else it stays, to be looked at
        shutil.rmtree(folder)


def count(lives: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = collections.Counter(s["kind"] for life in lives for s in life["struck"])
    phases = collections.Counter(s["phase"] for life in lives for s in life["struck"])
    bad = collections.Counter(s["kind"] for life in lives if life["lost"] for s in life["struck"])
    return {
        "faults": kinds.total(),
        "runs": len({life["case"] for life in lives}),
        "resumed_runs": len(lives),
        "jobs": sum(len(life["codes"]) for life in lives),
        "lost": [f"run {life['case']}: {life['lost']}" for life in lives if life["lost"]],
        "tried": dict(sorted(kinds.items())),
        "in_lost_runs": dict(sorted(bad.items())),
        "phases": dict(sorted(phases.items())),
    }


def text(v: dict[str, Any]) -> str:
    lines = [f"  {kind:20} {n:5} tried {v['in_lost_runs'].get(kind, 0):5} in runs that were lost"
             for kind, n in v["tried"].items()]  # fmt: skip
    when = ", ".join(f"{phase} {n}" for phase, n in v["phases"].items())
    return "\n".join([
        *lines, f"when: {when}",
        f"{v['faults']} faults against {v['runs']} drawn runs in {v['resumed_runs']} folders and "
        f"{v['jobs']} jobs: {len(v['lost'])} lost",
        *(f"  LOST {told}" for told in v["lost"]),
    ])  # fmt: skip


def launcher(given: str) -> str:
    """As words of a shell."""
    beside = Path(sys.prefix) / "bin" / "mpirun"
    found = given or (str(beside) if beside.exists() else shutil.which("mpirun") or "")
    if not found:
        raise UserError("there is no mpirun here: name it with --mpirun")
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    print("ended by a signal", flush=True)
    raise KeyboardInterrupt
