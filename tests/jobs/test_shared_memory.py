"""What a killed MPI job leaves in /dev/shm goes; what another job uses stays."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    with job() as left:
        assert left
    assert left <= segments(), "MPICH cleans up by itself now: the sweep is not needed"
    with job() as used:
        assert used and left <= set(shared_memory.sweep())
        assert used <= segments() and not left & segments()
    assert used <= set(shared_memory.sweep())


def test_what_is_open_or_mapped_or_of_another_name_stays() -> None:
    with ExitStack() as stack:
        prefixes = ("mpich_shm_test_", "mpich_shm_test_", "mpich_shm_test_", "other_shm_test_")
        opened, mapped, nobodys, other = (
            stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=p, dir=shared_memory.FOLDER, delete=False)
            )
            for p in prefixes
        )
        mapped.truncate(4096)
        held = mmap.mmap(mapped.fileno(), 4096)
        for file in (mapped, nobodys, other):
            file.close()
        removed = shared_memory.sweep()
        assert Path(nobodys.name).name in removed
        for file in (opened, mapped, other):
            assert Path(file.name).name not in removed
            Path(file.name).unlink()
        held.close()


def test_nothing_goes_where_not_all_processes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.NamedTemporaryFile(
        prefix="mpich_shm_test_", dir=shared_memory.FOLDER, delete=False
    ) as file:
        pass
    monkeypatch.setattr(shared_memory, "ALL_PROCESSES", 1)
    assert shared_memory.sweep() == [] and Path(file.name).exists()
    monkeypatch.undo()
    assert Path(file.name).name in shared_memory.sweep()
