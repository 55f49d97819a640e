"""One job at a time writes to a run's folder: a lock that the kernel frees when its process dies.

On file systems without locks nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import time
from pathlib import Path

from ..errors import UserError

NAME = ".lock"
DYING_S = 10.0  # a rank of a job that was just killed may still be ending
_claimed: dict[Path, int] = {}


def claim(folder: Path) -> None:
    """Only this process may write the run in this folder, until `release` or its end.

    A POSIX lock belongs to the process: a second run in the same process may follow a failed one.
    """
    key = folder.resolve()
    if key in _claimed:
        return
    try:
        handle = os.open(key / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    limit = time.monotonic() + DYING_S
    while not _try(handle):
        if time.monotonic() > limit:
            who = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            raise UserError(
                f"another job writes to {folder}{who and f' ({who})'}: wait for its end, or "
                "choose another --out"
            )
        time.sleep(0.1)
    with contextlib.suppress(OSError):  # on a full disk the owner is not named
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {platform.node()}\n".encode())
    _claimed[key] = handle


def _try(handle: int) -> bool:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def release(folder: Path) -> None:
    handle = _claimed.pop(folder.resolve(), None)
    if handle is not None:
        os.close(handle)
