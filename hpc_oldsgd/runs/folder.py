"""A run's folder: config.json, metrics.jsonl, summary.json, and TensorBoard when asked.

The columns of metrics.jsonl and everything else in the folder: docs/runs.md.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import replacing, write_atomically
from ..training.options import RunOptions
from ..transport import heartbeat
from . import reader
from .claim import claim, release
from .reader import finite

FILES = ("config.json", "metrics.jsonl", "summary.json")
NUMBERS = ("iteration", "step_s", "transfer", "exposed")
PACKAGES = ("hpc_oldsgd", "torch", "numpy", "mpi4py", "torchvision", "transformers")


class RunFolder:
    """The one writer of a run's files; on rank 0 only. A full disk ends no run."""

    def __init__(
        self,
        path: Path,
        tensorboard: bool = False,
        history: Sequence[dict[str, Any]] = (),
        config: dict[str, Any] | None = None,
        clear: Callable[[], None] = lambda: None,
    ) -> None:
        """`history` are the rows of a resumed run; whatever else metrics.jsonl held is dropped.

        `clear` removes what was there. It is called when the new files have found room: a start
        that a full disk refuses has removed nothing.
        """
        self.path = path
        self.problem = ""
        """Why the last row is not on the disk yet; it is tried again with the next."""
        files = {"metrics.jsonl": b"".join(map(_line, history))}
        if config is not None:
            files["config.json"] = _json(config)
        try:
            with contextlib.ExitStack() as stack:
                for name, content in files.items():
                    temporary = stack.enter_context(replacing(path / name))
                    with temporary.open("xb") as file:
                        file.write(content)
                clear()
            self._metrics = os.open(path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror}") from None
        self._unwritten = b""
        self._board: Any = None
        if tensorboard:
            self._board = _board(path, history[-1]["iteration"] + 1 if history else 0)

    def row(self, row: dict[str, Any]) -> None:
        self._unwritten += _line(row)
        why = self._write_rows()
        self.problem = f"metrics.jsonl: {why}" if why else ""
        if self._board is not None:
            try:
                for key, value in row.items():
                    if isinstance(value, (int, float)) and math.isfinite(value):
                        self._board.add_scalar(key, value, row["iteration"])
                self._board.flush()
            except OSError as error:
                self.problem = f"tensorboard: {error.strerror}"

    def _write_rows(self) -> str:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._metrics, self._unwritten) :]
        except OSError as error:
            return str(error.strerror)
        return ""

    def sync(self) -> None:
        """The rows so far outlive a power cut. From any thread."""
        os.fsync(self._metrics)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Whole or not at all: a reader never sees half a file."""
        write_atomically(self.path / name, _json(content))

    def summary(self, content: dict[str, Any]) -> dict[str, str]:
        """Write summary.json: what of the result is not on the disk, and why."""
        why = {"metrics.jsonl": self._write_rows(), "summary.json": ""}
        try:
            self.write("summary.json", content)
        except OSError as error:
            why["summary.json"] = str(error.strerror)
        return {name: text for name, text in why.items() if text}

    def close(self, run_goes_on: bool = False) -> None:
        """The folder is free for other jobs, unless the run goes on with another RunFolder."""
        os.close(self._metrics)
        if not run_goes_on:
            release(self.path)
        if self._board is not None:
            with contextlib.suppress(OSError):  # a full disk has been told of
                self._board.close()


def rows_before(run: Path, r: int) -> list[dict[str, Any]]:
    """The rows of the rounds before r. Skipped: a line that a crash cut short, and a row that
    lacks what the summary is made of."""
    if not (run / "metrics.jsonl").exists():
        return []
    rows = (row for _, row in reader.parsed_lines(run / "metrics.jsonl") if row is not None)
    whole = [row for row in rows if "hidden" in row and all(finite(row.get(k)) for k in NUMBERS)]
    return [row for row in whole if finite(row.get("round")) and row["round"] < r]


def prepare(path: Path, overwrite: bool) -> None:
    """Make the folder; an earlier run in it stays unless the user said otherwise."""
    take(path, overwrite)
    clear(path, overwrite)


def take(
    path: Path, overwrite: bool, resume: bool = False, seen: dict[str, Any] | None = None
) -> None:
    """Make the folder, for this job alone; `seen` is how it looked when this was decided on."""
    seen = look(path) if seen is None else seen
    check(path, overwrite, resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from None
    claim(path)
    if look(path) != seen:
        release(path)
        raise UserError(
            f"another job has just written to {path}: add --resume auto to go on with its run, or "
            "choose another --out"
        )


def check(path: Path, overwrite: bool, resume: bool = False) -> None:
    """Raises UserError where a run may not be written. Changes nothing."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: choose another --out")
    if path.is_dir() and any(map(_counts, path.iterdir())) and not resume:
        if not any((path / name).exists() for name in FILES):
            raise UserError(f"{path} holds something else than a run: choose another --out")
        if not overwrite:
            raise UserError(
                f"{path} holds a run: add --resume auto to go on with it, or --overwrite"
            )
        if path.is_symlink():
            raise UserError(
                f"{path} is a link, and nothing is removed through one: give --overwrite the "
                f"folder itself, {path.resolve()}"
            )
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = os.strerror(errno.EACCES if there.is_dir() else errno.ENOTDIR)
        raise UserError(f"cannot write to {path}: {why}")


def look(path: Path) -> dict[str, Any]:
    """Equal as long as no job has written a run to the folder."""
    found = {}
    for name in (*FILES, "checkpoints"):
        with contextlib.suppress(OSError):
            state = (path / name).lstat()
            found[name] = (state.st_ino, state.st_mtime_ns)
    return found


def clear(path: Path, overwrite: bool) -> None:
    """Remove what a run has left; of one that goes on, only what says that it has ended."""
    names = (*FILES, "checkpoints", "trace.json", "tensorboard") if overwrite else FILES[-1:]
    for old in (path / name for name in names):
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)  # a link is removed, never followed


def folder_for(options: RunOptions, n: int) -> Path:
    """--out, or a new name below runs/."""
    if options.out is not None:
        return options.out
    # To the microsecond: the members of a job array start in the same second.
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S.%f")
    graph = options.topology.replace("/", "_")
    name = f"{stamp}-{options.task}-{options.algorithm}-{graph}-n{n}-seed{options.seed}"
    return Path("runs") / name


def _counts(entry: Path) -> bool:
    """Not what a run leaves that was killed before its first file, nor NFS's own hidden files."""
    return entry.name != heartbeat.FOLDER and not entry.name.startswith(".")


def environment() -> dict[str, Any]:
    """What the run depended on: versions, machine, the state of the source tree."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(PACKAGES),
        "git": _git(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def clean(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {key: clean(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(clean(content), indent=2).encode() + b"\n"


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(clean(row)).encode() + b"\n"


def _git() -> dict[str, Any] | None:
    """Of this package's own checkout, if it is one."""
    here = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


def _board(path: Path, iteration: int) -> Any:
    """Event files that a resumed run goes on with; what it repeats is hidden."""
    from torch.utils.tensorboard import SummaryWriter  # the options have looked for the package

    return SummaryWriter(str(path / "tensorboard"), purge_step=iteration)
