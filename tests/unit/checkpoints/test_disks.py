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
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import NotSaved, UserError
from hpc_oldsgd.runtime import part_file
from support import faults
from support.runs import SHORT, contents, rows_of, simulated


def test_a_run_does_not_wait_for_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is written when seven rounds have passed; what was due meanwhile follows then."""
    passed, write = threading.Event(), part_file.write

    def slow(path: Path, state: Any) -> part_file.Written:
        assert passed.wait(60)
        return write(path, state)

    monkeypatch.setattr(part_file, "write", slow)
    simulated(f"{SHORT} --keep 99", tmp_path / "run", on_step=lambda t: t < 15 or passed.set())
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


@pytest.mark.usefixtures("fast_disk")
def test_a_full_disk_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files may not grow past a size: the first checkpoint fits, later ones do not."""
    run, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(t: int) -> None:
        if faults.has_checkpoint(run):
            faults.fill_disk(2000)

    why = r"metrics\.jsonl and the last checkpoint: File too large; .*--resume auto --out"
    try:
        with pytest.raises(NotSaved, match=why) as ended:
            simulated(SHORT, run, on_step=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.exit_code == 5
    said = capsys.readouterr()
    assert "File too large); the run goes on, the last valid one is round-" in said.err
    assert "warning: metrics.jsonl: File too large; the run goes on" in said.err
    assert "test accuracy of the mean model" in said.out
    left = store.newest_first(run)  # what was half written is gone
    assert all((folder / "manifest.json").exists() for folder in left)
    assert export.newest(run, print).folder == left[0]
    assert f"the last valid one is {left[0].name}" in said.err
    simulated(f"{SHORT} --resume auto", run)
    assert [row["round"] for row in rows_of(run)] == [3, 6, 9, 12, 15, 18, 20]


@pytest.mark.parametrize("how", ["--resume auto", "--overwrite"])
def test_a_start_that_a_full_disk_refuses_has_removed_nothing(tmp_path: Path, how: str) -> None:
    run = simulated(SHORT, tmp_path / "run")
    kept, before = contents(run), resource.getrlimit(resource.RLIMIT_FSIZE)
    faults.fill_disk(100)
    try:
        with pytest.raises(UserError, match=f"cannot write to {run}: File too large"):
            simulated(f"{SHORT} --iterations 60 {how}", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(run) == kept


def test_only_the_summary_is_missing(tmp_path: Path) -> None:
    """A folder in its place: no file system would take it."""
    run = tmp_path / "run"
    with pytest.raises(NotSaved, match=r"could not write summary\.json: Is a directory"):
        simulated(SHORT, run, on_step=lambda t: (run / "summary.json").mkdir(exist_ok=True))
    assert export.newest(run, print).r == 20


def test_a_run_that_could_save_nothing_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words are to go on with --resume auto, so that is not refused."""
    run = tmp_path / "run"

    def full(path: Path, state: Any) -> part_file.Written:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(part_file, "write", full)
        with pytest.raises(NotSaved, match=r"the last checkpoint: .*go on with --resume auto"):
            simulated(SHORT, run)
    rows = rows_of(run)
    assert (run / "summary.json").exists() and not faults.has_checkpoint(run)
    with pytest.raises(UserError, match="holds another run: seed is 1, was 0"):
        simulated(f"{SHORT} --resume auto --seed 1", run)
    simulated(f"{SHORT} --resume auto", run)
    assert rows_of(run) == rows and export.newest(run, print).r == 20
