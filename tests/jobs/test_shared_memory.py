"""What a killed MPI job leaves in /dev/shm goes; what another job uses stays."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_oldsgd.launch import shared_memory
from support.processes import children, wait_for

WAIT = "from mpi4py import MPI; print(flush=True); import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def all_processes_are_seen() -> None:
    if Path("/proc/self/ns/pid").stat().st_ino != shared_memory.ALL_PROCESSES:
        pytest.skip("in a container nothing is swept")


def segments() -> set[str]:
    return {path.name for path in shared_memory._candidates()}


@contextmanager
def job() -> Iterator[set[str]]:
    """Two ranks that have started MPI, and what they have in shared memory; all killed at once."""
    before, command = segments(), Path(sys.prefix) / "bin" / "mpirun"
    if not command.exists():
        pytest.skip("needs the MPICH wheel")
    launcher = subprocess.Popen(
        [command, "-n", "2", sys.executable, "-c", WAIT], stdout=subprocess.PIPE
    )
    try:
        assert launcher.stdout is not None
        launcher.stdout.readline(), launcher.stdout.readline()
        processes = [launcher.pid, *(p := children(launcher.pid)), *children(p[0])]
        assert len(processes) == 4
        ours = segments() - before
        maps = Path(f"/proc/{processes[-1]}/maps").read_text()
        yield {name for name in ours if name in maps}
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
        launcher.communicate()
        wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


def test_only_what_is_nobodys_is_removed() -> None:
    """Jobs of other tests may sweep at the same time: what counts is what is there in the end."""
    with job() as left:
        assert left
    with job() as used:
        shared_memory.sweep()
        assert used and used <= segments() and not left & segments()
    shared_memory.sweep()
    assert not used & segments()


def test_what_is_open_or_mapped_or_of_another_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    names = ("mpich_shm_open", "mpich_shm_mapped", "other_shm", "mpich_shm_nobodys")
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    (tmp_path / "mpich_shm_link").symlink_to(tmp_path / "other_shm")
    with (tmp_path / "mpich_shm_open").open(), (tmp_path / "mpich_shm_mapped").open("r+b") as file:
        held = mmap.mmap(file.fileno(), 4096)
        file.close()
        with monkeypatch.context() as patched:
            patched.setattr(shared_memory, "ALL_PROCESSES", 1)  # as in a container
            assert shared_memory.sweep() == []
        assert shared_memory.sweep() == ["mpich_shm_nobodys"]
        held.close()
    assert {path.name for path in tmp_path.iterdir()} == {*names[:3], "mpich_shm_link"}
