"""Runs whose disk is slow or full."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd import export
from hpc_oldsgd.checkpoints import part_file, store
from hpc_oldsgd.cli.console import Console
from support.simulated_runs import SHORT, rows_of, simulated


def test_a_run_does_not_wait_for_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is written when seven rounds have passed; what was due meanwhile follows then."""
    passed, write, step = threading.Event(), part_file.write, Console.step

    def slow(path: Path, state: Any) -> part_file.Written:
        assert passed.wait(60)
        return write(path, state)

    def seen(console: Console, t: int) -> None:
        step(console, t)
        if t > 14:
            passed.set()

    monkeypatch.setattr(part_file, "write", slow)
    monkeypatch.setattr(Console, "step", seen)
    simulated(f"{SHORT} --keep 99", tmp_path / "run")
    end, *_, start = found = [store.find(p).r for p in store.newest_first(tmp_path / "run")]
    assert (start, end) == (0, 20) and found[-2] > 7


def test_a_disk_that_syncs_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems answer fsync of a folder with EINVAL: files are as safe there."""
    fsync = os.fsync

    def files_only(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", files_only)
    simulated(SHORT, tmp_path / "run")
    assert export.newest(tmp_path / "run", print).r == 20


@pytest.mark.usefixtures("prompt_disk")
def test_a_full_disk_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may not grow past a size: the first checkpoint fits, later ones do not."""
    run, soft = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    step = Console.step

    def limit(console: Console, t: int) -> None:
        step(console, t)
        if any(run.glob("checkpoints/*/manifest.json")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, soft[1]))

    monkeypatch.setattr(Console, "step", limit)
    try:
        simulated(SHORT, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    said = capsys.readouterr()
    assert "File too large); the run goes on, the last valid one is round-" in said.err
    assert "warning: metrics.jsonl: File too large; the run goes on" in said.err
    assert "test accuracy of the mean model" in said.out
    left = store.newest_first(run)  # what was half written is gone
    assert all((folder / "manifest.json").exists() for folder in left)
    assert export.newest(run, print).folder == left[0]
    assert f"the last valid one is {left[0].name}" in said.err
    monkeypatch.undo()
    simulated(f"{SHORT} --resume auto", run)
    assert [row["round"] for row in rows_of(run)] == [3, 6, 9, 12, 15, 18, 20]
