"""Shared memory that MPI jobs which were killed have left in /dev/shm.

A rank maps its file as long as it lives. So a file of this user that no process maps or holds open
is nobody's. This can be told only where all processes of the machine can be seen, which is not so
in a container: there nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

FOLDER = Path("/dev/shm")
NAMES = ("mpich_shm_*", "sm_segment.*")  # MPICH's, Open MPI's
ALL_PROCESSES = 0xEFFFFFFC  # the number that Linux gives to the first PID namespace


def sweep() -> list[str]:
    """Remove what is nobody's, and name it."""
    with contextlib.suppress(OSError):
        if Path("/proc/self/ns/pid").stat().st_ino != ALL_PROCESSES:
            return []
        left = {number: path for path in _candidates() if (number := _own(path))}
        held = _held() if left else None
        nobodys = [] if held is None else [number for number in left if number not in held]
        return [left[number].name for number in nobodys if _remove(left[number], number)]
    return []


def _candidates() -> list[Path]:
    return [path for name in NAMES for path in FOLDER.glob(name)]


def _own(path: Path) -> int:
    """The inode of a regular file of this user; else 0."""
    with contextlib.suppress(OSError):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid():
            return state.st_ino
    return 0


def _remove(path: Path, number: int) -> bool:
    with contextlib.suppress(OSError):
        if _own(path) == number:
            path.unlink()
            return True
    return False


def _held() -> set[int] | None:
    """Inodes that processes map or hold open; None where one of this user does not tell."""
    found: set[int] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or process.name == "1":  # init is no rank
            continue
        try:
            for line in (process / "maps").read_bytes().splitlines():
                found.add(int(line.split(None, 5)[4]))
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.add(handle.stat().st_ino)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            if _is_ours(process):
                return None
    return found


def _is_ours(process: Path) -> bool:
    """Another user's process cannot hold a file of ours, which only we may open."""
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith("Uid:"):
                return str(os.getuid()) in line.split()[1:]
    return False
