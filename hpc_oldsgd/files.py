"""Files that several processes share: written whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # answers of network file systems


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new path in the same folder. What the block writes there becomes `path` when it ends.

    If the block fails, the new file is removed and `path` stays as it was.
    """
    # The name is random: processes of two hosts can have the same number.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_regular(path: Path) -> bytes:
    """The bytes of a file. OSError for anything else: reading a pipe would wait for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        try:
            if stat.S_ISREG(os.fstat(handle).st_mode):
                return file.read()
        except OSError as error:  # read() does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from None
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def write_atomically(path: Path, content: bytes | str, *, sync: bool = False) -> None:
    """Readers see the old file or the whole new one. With `sync` it survives a power cut."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    if sync:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Names in the folder survive a power cut, if the file system can do that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of a process that dies.

    On a file system without locks nobody waits, and the same work is done more than once.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
