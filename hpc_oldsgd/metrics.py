"""A run's folder: config.json, metrics.jsonl, summary.json, and TensorBoard when asked.

Columns of metrics.jsonl, one row per evaluation (units: seconds, or gradients of the virtual
clock where a name has no _s):

    round, iteration   rounds completed, gradients per agent
    time               wall seconds since the start, or simulated time
    train_loss         f(xbar): loss of the mean model on a fixed sample of the training set
    test_loss, test_accuracy | test_perplexity   of the mean model
    consensus          (1/n) sum_i ||x_i - xbar||^2, exact
    consensus_op       (1/n) sum_ij w_ij ||y_j - y_i||^2 of the last mixing, from the fused pass
    batch_loss         mean training loss of the batches since the last row
    agent_loss         the same per agent
    step_s             wall seconds per gradient, waits and mixing included
    samples_per_s      all agents together
    transfer, exposed  mean time of a flight, and how long the agent stood waiting for it
    hidden             1 - exposed / transfer
    eval_s             wall seconds this rank has spent measuring the mean model
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import UserError

FILES = ("config.json", "metrics.jsonl", "summary.json")
PACKAGES = ("hpc_oldsgd", "torch", "numpy", "mpi4py", "torchvision", "transformers")


class RunFolder:
    """The one writer of a run's files; on rank 0 only."""

    def __init__(self, path: Path, tensorboard: bool = False) -> None:
        self.path = path
        self._metrics = (path / "metrics.jsonl").open("a", buffering=1)
        self._board: Any = _board(path) if tensorboard else None

    def row(self, row: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(clean(row)) + "\n")
        if self._board is not None:
            for key, value in row.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self._board.add_scalar(key, value, row["iteration"])

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Whole or not at all: a reader never sees half a file."""
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(clean(content), indent=2) + "\n")
        temporary.replace(self.path / name)

    def close(self) -> None:
        self._metrics.close()
        if self._board is not None:
            self._board.close()


def prepare(path: Path, overwrite: bool, resume: bool = False) -> None:
    """Make the folder; an earlier run in it stays unless the user said otherwise."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: choose another --out")
    if path.is_dir() and any(path.iterdir()) and not resume:
        if not any((path / name).exists() for name in FILES):
            raise UserError(f"{path} holds something else than a run: choose another --out")
        if not overwrite:
            raise UserError(f"{path} holds a run: add --overwrite to replace it")
        for name in (*FILES, "checkpoints", "trace.json", "tensorboard"):
            old = path / name
            if old.is_symlink() or old.is_file():
                old.unlink()  # a link is removed, never followed
            elif old.is_dir():
                shutil.rmtree(old)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from None


def environment() -> dict[str, Any]:
    """What the run depended on: versions, machine, the state of the source tree."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
        "git": _git(),
    }


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


def _board(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard needs the tensorboard package: pip install 'hpc_oldsgd[tensorboard]'"
        ) from None
    return SummaryWriter(str(path / "tensorboard"))  # type: ignore[no-untyped-call]
