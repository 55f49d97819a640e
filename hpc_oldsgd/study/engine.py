"""Runs the cells of a study that are not there yet: a few processes, one bar, a time to wait.

A process runs many cells, so torch is imported once. A cell that was cut short goes on from its
checkpoint if it has one, else it starts again; what is done stays.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import multiprocessing
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from ..errors import Diverged, UserError
from ..runs import reader
from ..runs.backend import Stacked
from ..runs.reader import Run
from ..runs.session import Session
from ..runs.spec import Spec
from ..tasks import Task
from .cells import DIVERGED, Cell, Shelf
from .grid import StudyOptions
from .pack import unpacked
from .report import duration

SLICE_S = 0.5  # between two looks at the processes
SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")  # of one measurement
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
LINE_S = 30.0  # between two lines where there is no terminal
Progress = Callable[[int], None]


def runs(cells: Sequence[Cell], options: StudyOptions, out: Path) -> dict[str, Run]:
    """The run of each cell by its key, those missing run first unless only a report is asked."""
    also = [place if place.is_dir() else unpacked(place) for place in options.also]
    places = [out / "runs", *also]
    missing = unfinished(cells, Shelf(places))
    if options.dry_run and not missing:
        print(f"0 of {len({cell.key for cell in cells})} runs to go", flush=True)
        raise SystemExit(0)
    if missing and not options.report_only:
        _announce(cells, missing, options)
        if options.dry_run:
            raise SystemExit(0)
        _run_all(missing, options, out / "runs")
    shelf = Shelf(places)
    found = {cell.key: (cell, shelf.find(cell)) for cell in cells}
    begun = {key: _cut(cell, run) for key, (cell, run) in found.items() if run is not None}
    return {k: run for k, run in begun.items() if run.rows or (run.path / DIVERGED).exists()}


def _cut(cell: Cell, run: Run) -> Run:
    """As if it had ended where the cell does: a run on the shelf may be longer."""
    last = -(-cell.iterations // cell.tau) * cell.tau
    return replace(run, rows=[row for row in run.rows if row["iteration"] <= last])


def unfinished(cells: Sequence[Cell], shelf: Shelf) -> list[Cell]:
    """Each run once, the long ones first, so that no process is left alone with one at the end."""
    missing: dict[str, Cell] = {}
    for cell in cells:
        run = shelf.find(cell)
        if run is None or not cell.done(run):
            missing[cell.key] = cell
    return sorted(missing.values(), key=lambda cell: -cell.n * cell.iterations)


def jobs(options: StudyOptions) -> int:
    return options.jobs or len(os.sched_getaffinity(0))


# --- what is ahead ------------------------------------------------------------------------------
def _announce(cells: Sequence[Cell], missing: Sequence[Cell], options: StudyOptions) -> None:
    total = len({cell.key for cell in cells})
    steps = sum(cell.n * cell.iterations for cell in missing)
    rows = sum(cell.iterations // (cell.tau * (cell.options.eval_every or 1)) for cell in missing)
    told = f"{len(missing)} of {total} runs to go, {steps:,} gradients, {rows:,} measurements"
    if options.mpi:
        told += ", a time to wait after the first run"
    else:
        step_s, row_s = _seconds(missing[0])
        seconds = (steps * step_s + rows * row_s) / min(jobs(options), len(missing))
        told += f", {duration(seconds)}"
    print(f"{told}; less where runs end at their target", flush=True)


def _seconds(cell: Cell, steps: int = 4) -> tuple[float, float]:
    """Of one agent's gradient and all around it, and of one measurement, in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    short = replace(cell.options, iterations=10**6, target=None, eval_every=10**6, eval_samples=1)
    spec = Spec(short, cell.algorithm, copy.copy(cell.task))
    session = Session(spec, Stacked(short), in_folder=False)
    session.runner.start()
    start = 0.0
    for k in range(steps + 1):
        if k == 1:
            start = time.perf_counter()
        session.loop.gradients()
        session.runner.step()
    seconds = (time.perf_counter() - start) / steps / cell.n
    model, samples, task = session.models[0], cell.options.eval_samples, spec.task
    for split in SPLITS:  # the first time reads the data
        task.evaluate(model, split, samples)
    start = time.perf_counter()
    for split in SPLITS:
        task.evaluate(model, split, samples)
    row_s = time.perf_counter() - start
    session.runner.finish()
    torch.set_num_threads(threads)
    return seconds, row_s


def _announce_rest(first: Path, seconds: float, rest: Sequence[Cell]) -> None:
    """Over MPI only a run tells how long one takes: all agents step at once, so by iterations."""
    (run,) = reader.read_one(first)
    if run.rows:
        pace = seconds / run.rows[-1]["iteration"]
        left = duration(pace * sum(cell.iterations for cell in rest))
        print(f"the first run took {seconds:.0f} s: {left} for the others", flush=True)


# --- all of them --------------------------------------------------------------------------------
def _run_all(missing: Sequence[Cell], options: StudyOptions, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    total = sum(cell.n * cell.iterations for cell in missing)
    with contextlib.closing(Bar(total)) as bar:
        if options.mpi:
            for k, cell in enumerate(missing):
                start = time.perf_counter()
                _run_mpi(cell, place / cell.folder, options.launcher)
                if k == 0 and missing[1:]:
                    _announce_rest(place / cell.folder, time.perf_counter() - start, missing[1:])
                bar.update(cell.n * cell.iterations)
        elif min(jobs(options), len(missing)) == 1:
            for cell in missing:
                run_one(cell, place / cell.folder, bar.update)
        else:
            _run_parallel(missing, min(jobs(options), len(missing)), place, bar)


class Bar:
    """On a terminal a bar; elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(
            total=total, unit="gradients", unit_scale=True, disable=not sys.stderr.isatty()
        )
        self.total, self.done = total, 0
        self._start = time.perf_counter()
        self._line_at = self._start + LINE_S

    def update(self, steps: int) -> None:
        self._bar.update(steps)
        self.done += steps
        now = time.perf_counter()
        if self._bar.disable and now >= self._line_at:
            share = max(self.done / self.total, 1e-9)
            left = duration((now - self._start) * (1 - share) / share)
            print(f"{share:4.0%} of the gradients, {left} left", flush=True)
            self._line_at = now + LINE_S

    def close(self) -> None:
        self._bar.close()


def _run_parallel(missing: Sequence[Cell], count: int, place: Path, bar: Bar) -> None:
    context = multiprocessing.get_context("spawn")
    ticks = context.Queue()
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(ticks,))
    try:
        waiting: set[Future[None]] = {
            pool.submit(_in_process, cell, place / cell.folder) for cell in missing
        }
        while waiting:
            done, waiting = wait(waiting, timeout=SLICE_S, return_when=FIRST_EXCEPTION)
            with contextlib.suppress(queue.Empty):
                while True:
                    bar.update(ticks.get_nowait())
            for future in done:
                future.result()
    except BrokenProcessPool:
        raise UserError(
            "a process of the study was killed, often for want of memory: start the study again, "
            "with fewer --jobs; what is done stays"
        ) from None
    except BaseException:  # a cell that is cut short is run again
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        ticks.cancel_join_thread()


# --- one ----------------------------------------------------------------------------------------
_ticks: Any = None
_tasks: dict[str, Task] = {}


def _begin(ticks: Any) -> None:
    global _ticks
    _ticks = ticks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """However the study ends, kill -9 included, no process goes on without it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_process(cell: Cell, path: Path) -> None:
    task = _tasks.setdefault(repr(cell.task), cell.task)  # it keeps its data
    run_one(replace(cell, task=task), path, _ticks.put)


class _Counter:
    """Passes on how many gradients are done, now and then."""

    def __init__(self, cell: Cell, progress: Progress) -> None:
        self.cell, self.progress = cell, progress
        self.told, self.next = 0, time.perf_counter()

    def step(self, t: int) -> None:
        if time.perf_counter() >= self.next:
            self.tell(t)
            self.next = time.perf_counter() + SLICE_S

    def tell(self, t: int) -> None:
        t = min(t, self.cell.iterations)
        self.progress((t - self.told) * self.cell.n)
        self.told = t


def run_one(cell: Cell, path: Path, progress: Progress = lambda steps: None) -> None:
    """As `simulate --resume auto` does it. A run that ends early has done its share."""
    counter = _Counter(cell, progress)
    if _all_runs(path, cell.done):  # by another study that shares the folder, meanwhile
        counter.tell(cell.iterations)
        return
    _clear_unfit(cell, path)
    options = replace(cell.options, out=path, resume="auto")
    spec = Spec(options, cell.algorithm, cell.task)
    try:
        Session(spec, Stacked(options), on_step=counter.step).run()
    except Diverged:
        (path / DIVERGED).touch()
    shutil.rmtree(path / "checkpoints", ignore_errors=True)  # nothing goes on from here
    counter.tell(cell.iterations)


def _run_mpi(cell: Cell, path: Path, launcher: str) -> None:
    _clear_unfit(cell, path)
    words = ["-m", "hpc_oldsgd.train", *cell.words(path), "--resume", "auto"]
    command = [*shlex.split(launcher.format(n=cell.n)), sys.executable, *words]
    more = {"stdout": subprocess.DEVNULL, "preexec_fn": _terminate_with_parent}
    if launch(command, path.name, allowed=Diverged.exit_code, **more) == Diverged.exit_code:
        (path / DIVERGED).touch()
    shutil.rmtree(path / "checkpoints", ignore_errors=True)


def launch(command: Sequence[str], what: str, allowed: int = 0, **more: Any) -> int:
    """Run a command that starts MPI: 0, or the exit code that is allowed. Else a UserError."""
    if shutil.which(command[0]) is None:
        raise UserError(f"There is no {command[0]}: name what starts MPI with --launcher.")
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, **more)
    if ended.returncode not in (0, allowed):
        last = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{what} ended with {ended.returncode}: {last[0]}")
    return ended.returncode


def _terminate_with_parent() -> None:
    """However the study ends, kill -9 included, its ranks write a checkpoint and end too."""
    with contextlib.suppress(AttributeError, OSError):  # Linux's own
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _clear_unfit(cell: Cell, path: Path) -> None:
    """A run that ended has no checkpoint left: it would be taken for one to be kept."""
    # Not kept: a run killed before its first file, torn by a power cut, or measured less than
    # asked. Its rows would stay.
    if path.is_dir() and not _all_runs(path, cell.measured):
        shutil.rmtree(path)
    (path / "summary.json").unlink(missing_ok=True)


def _all_runs(path: Path, test: Callable[[Run], bool]) -> bool:
    """Whether the folder can be read and its runs pass the test."""
    try:
        return all(map(test, reader.read_one(path)))
    except UserError:
        return False
