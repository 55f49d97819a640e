"""Files are whole or not there, whatever fails and whoever writes at the same time."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from hpc_oldsgd.files import replacing, write_atomically


def test_an_interrupted_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def dies(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new", sync=True)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert list(tmp_path.iterdir()) == []


def test_readers_see_whole_files(tmp_path: Path) -> None:
    """Two threads of one process write at the same time: their temporary files differ."""
    path, contents = tmp_path / "file", (b"a" * 100_000, b"b" * 100_000)
    write_atomically(path, contents[0])
    failed: list[OSError] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(100):
                write_atomically(path, content)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert not failed and list(tmp_path.iterdir()) == [path]


def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    """A shared cache is of no use to others if only its maker can read it."""
    write_atomically(tmp_path / "ours", b"")
    (tmp_path / "plain").write_bytes(b"")
    ours, plain = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain"))
    assert ours == plain


def test_only_a_refused_folder_sync_is_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, answer = os.fsync, errno.EINVAL

    def on_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(answer, os.strerror(answer))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", on_folders)
    write_atomically(tmp_path / "file", b"content", sync=True)
    assert (tmp_path / "file").read_bytes() == b"content"
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(tmp_path / "file", b"content", sync=True)
