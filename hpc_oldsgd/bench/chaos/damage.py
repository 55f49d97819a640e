"""What may befall the files of a run between two jobs.

A `HARMLESS` one leaves a whole checkpoint, and the next job must go on from it. After one of
`REFUSED` the next job must refuse to go on and change nothing; then the damage is undone.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path

from ...checkpoints.store import FOLDER, MANIFEST, newest_first
from ...transport import heartbeat

Undo = Callable[[], None]
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def complete(run: Path) -> list[Path]:
    """The checkpoints with a manifest, newest first."""
    return [folder for folder in newest_first(run) if (folder / MANIFEST).is_file()]


def contents(run: Path) -> dict[str, bytes | str]:
    """All that a job which refuses to go on must leave as it is."""
    found: dict[str, bytes | str] = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if not name.startswith((".lock", heartbeat.FOLDER)) and not path.is_dir():
            odd = path.is_symlink() or not path.is_file()
            found[name] = "odd" if odd else path.read_bytes()
    return found


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(max(1, path.stat().st_size)))


def flip(path: Path, chance: random.Random) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def drop(path: Path, chance: random.Random) -> None:
    path.unlink()


def pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def garble(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(40) + b"\n{}\n[1\n")


WAYS = {"cut": cut, "flipped": flip, "missing": drop, "pipe": pipe}


def _newest_file(run: Path, chance: random.Random, manifest: bool) -> Path | None:
    """Of the newest checkpoint, if there is an older one to go on from."""
    found = complete(run)
    if len(found) < 2:
        return None
    files = sorted(found[0].glob("rank-*"))
    return found[0] / MANIFEST if manifest else chance.choice(files) if files else None


def harm(run: Path, kind: str, chance: random.Random) -> bool:
    """Whether there was something to harm. `kind` is what-way, of HARMLESS."""
    what, _, way = kind.partition("-")
    if what == "leftovers":
        return _leave(run, chance)
    if what in ("shard", "manifest"):
        path = _newest_file(run, chance, manifest=what == "manifest")
    else:
        path = run / {"metrics": "metrics.jsonl", "config": "config.json"}[what]
        if not complete(run):
            return False  # config.json alone tells that this is the start of the same run
    if path is None or not path.is_file():
        return False
    {**WAYS, "garbled": garble}[way](path, chance)
    return True


def _leave(run: Path, chance: random.Random) -> bool:
    """What other kills could have left: half a checkpoint, and files under another name."""
    if not complete(run):
        return False
    half = run / FOLDER / f"round-{chance.randrange(10**6, 10**7):08d}"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(chance.randbytes(50))
    (run / ".metrics.jsonl.00000000").write_bytes(b"{")
    (complete(run)[0] / ".rank-00000.safetensors.00000000").write_bytes(b"")
    return True


HARMLESS = (
    *(f"shard-{way}" for way in WAYS), *(f"manifest-{way}" for way in WAYS),
    "metrics-cut", "metrics-missing", "metrics-garbled",  # rows have no checksum: no bit flips
    *(f"config-{way}" for way in WAYS),
    "leftovers",
)  # fmt: skip
REFUSED = ("all-damaged", "disk-error", "disk-away", "metrics-pipe")


def refuse(run: Path, kind: str, chance: random.Random) -> Undo | None:
    """Do what the next job must refuse to go on after; what undoes it. None if nothing is there."""
    found = complete(run)
    if not found:
        return None
    kept = run.with_suffix(".kept")
    if kind == "disk-away":
        return away(run)
    if kind in ("disk-error", "metrics-pipe"):
        path = found[0] / MANIFEST if kind == "disk-error" else run / "metrics.jsonl"
        path.rename(kept)
        if kind == "disk-error":
            path.symlink_to("/proc/self/mem")  # whose first byte nobody can read: EIO
        else:
            os.mkfifo(path)

        def put_back() -> None:
            path.unlink()
            kept.rename(path)

        return put_back
    whole: dict[Path, bytes] = {}
    for each in found:
        damaged = chance.choice([each / MANIFEST, *filter(Path.is_file, each.glob("rank-*"))])
        whole[damaged] = damaged.read_bytes()
        flip(damaged, chance)

    def restore() -> None:
        for path, content in whole.items():
            path.write_bytes(content)

    return restore


def away(run: Path) -> Undo:
    """The checkpoints are on a disk that is not there, until it is put back."""
    place, kept = run / FOLDER, run.with_suffix(".away")
    kept.symlink_to("/nonexistent")
    try:
        exchange(kept, place)
    except OSError:
        kept.unlink()
        raise

    def put_back() -> None:
        if os.path.lexists(place):
            exchange(kept, place)
            kept.unlink()
        else:
            kept.rename(place)

    return put_back


def exchange(a: Path, b: Path) -> None:
    """The names of two files, in one step: a job makes its folder anew as soon as it is missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), f"cannot exchange {a} and {b}")
