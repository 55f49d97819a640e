"""Checkpoints on the disk: the manifest that makes one valid, which to use, which to remove.

RUN/checkpoints/round-00000120/rank-00000.safetensors ...   manifest.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..files import read_regular, write_atomically
from ..runtime import part_file
from ..runtime.part_file import Unusable, Written
from .well_formed import manifest_fits

T = TypeVar("T")
FORMAT = 1
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
Gather = Callable[[str], list[str]]
"""A text of every process, on all of them."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a manifest that can be trusted; its parts are still to be checked."""

    folder: Path
    manifest: dict[str, Any] = field(repr=False)

    @property
    def r(self) -> int:
        return int(self.manifest["round"])

    @property
    def count(self) -> int:
        return len(self.manifest["shards"])

    def check(self, part: int) -> None:
        if part >= self.count:
            raise Unusable(f"it has {self.count} parts, and none for rank {part}")
        entry = self.manifest["shards"][part]
        part_file.check(self.folder / entry["file"], Written(entry["sha256"], entry["bytes"]))

    def path(self, part: int) -> Path:
        return self.folder / str(self.manifest["shards"][part]["file"])

    def read(self, part: int) -> dict[str, Any]:
        state: dict[str, Any] = part_file.read(self.path(part))
        return state


def part_name(k: int) -> str:
    return f"rank-{k:05d}.safetensors"


def folder_name(r: int) -> str:
    return f"round-{r:08d}"


def folder_of(run: Path, r: int) -> Path:
    return run / FOLDER / folder_name(r)


def newest_first(run: Path) -> list[Path]:
    """Checkpoints of a run, whole or not."""
    found = [p for p in (run / FOLDER).glob("round-*") if p.name.removeprefix("round-").isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("round-")), reverse=True)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    body = json.dumps(manifest, sort_keys=True)
    text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
    write_atomically(folder / MANIFEST, text + "\n", sync=True)


def find(folder: Path) -> Checkpoint:
    """Raises Unusable, or OSError where the disk does not answer."""
    path = folder / MANIFEST
    if not path.is_file():
        raise Unusable("it was never completed")
    try:
        outer = json.loads(read_regular(path))
        body = outer["manifest"]
        if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
            raise Unusable(f"the checksum of {MANIFEST} is wrong")
        manifest = json.loads(body)
        version = manifest["format"]
    except FileNotFoundError:  # another job removes it just now
        raise Unusable("it was never completed") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise Unusable(f"{MANIFEST} cannot be read") from None
    if version != FORMAT:
        raise Unusable(f"it has format {version}, this version reads {FORMAT}")
    if not _well_formed(manifest):
        raise Unusable(f"{MANIFEST} is not one of ours")
    return Checkpoint(folder, manifest)


def _well_formed(manifest: Any) -> bool:
    """Everything that is read later has its type, and no file is outside the folder."""
    return manifest_fits(manifest) and all(
        entry["file"] == part_name(k) for k, entry in enumerate(manifest["shards"])
    )


def prune(run: Path, keep: int) -> None:
    """Remove all but the `keep` newest complete ones, and what older crashes have left."""
    if (run / FOLDER).is_symlink():
        return  # nothing is deleted through a link
    complete = [p for p in newest_first(run) if (p / MANIFEST).is_file()]
    kept = set(complete[:keep])
    newest = complete[0].name if complete else ""
    for folder in newest_first(run):
        if folder not in kept and folder.name < newest:
            remove(folder)


def remove_newer(run: Path, r: int) -> None:
    """Remove checkpoints after round r: a run that goes on from there makes them again."""
    if not (run / FOLDER).is_symlink():
        for folder in newest_first(run):
            if folder.name > folder_of(run, r).name:
                remove(folder)


def remove(folder: Path) -> None:
    """The manifest first: what is half removed is not a checkpoint. Links are not followed."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.iterdir():
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def run_of(path: Path) -> Path:
    """The run that a folder, or the folder behind a link, is or belongs to."""
    path = _resolved(path)
    is_checkpoint = path.name.startswith("round-") and path.parent.name == FOLDER
    return path.parent.parent if is_checkpoint else path


def _resolved(path: Path) -> Path:
    return path.resolve() if path.is_symlink() else path


def choose(
    path: Path,
    parts_here: Callable[[Checkpoint], list[int]],
    gather: Gather,
    say: Callable[[str], None],
    refuse: Callable[[dict[str, Any]], str] = lambda run: "",
) -> Checkpoint | None:
    """The newest checkpoint whose every part is what was written; None if there never was one.

    Collective: `gather` brings a text of every rank to all. Each rank checks its own parts.
    `refuse` says why this run cannot be resumed; nothing if it can.
    """
    path, run = _resolved(path), run_of(path)
    listed = [path] if run != path else newest_first(run)
    names = [name for name in gather("\n".join(p.name for p in listed))[0].split("\n") if name]
    problems: list[str] = []
    for name in names:
        found, problem = _agree(gather, name, partial(find, run / FOLDER / name))
        if not problem and found is not None:
            if why := refuse(found.manifest["run"]):
                raise UserError(why)
            _, problem = _agree(gather, name, partial(_check_parts, found, parts_here))
            if not problem:
                return found
        problems.append(problem)
        say(f"checkpoint {name} is not usable ({problem}): trying the one before")
    # One that was never completed is no loss. A damaged one needs a decision of the user.
    if any(problem != "it was never completed" for problem in problems) or run != path:
        raise UserError(f"no checkpoint in {run} is usable ({problems[0]}): start again elsewhere")
    return None


def _check_parts(found: Checkpoint, parts_here: Callable[[Checkpoint], list[int]]) -> None:
    for part in parts_here(found):
        found.check(part)


def _agree(gather: Gather, name: str, step: Callable[[], T]) -> tuple[T | None, str]:
    """The step's result, and why the checkpoint is not usable on some rank. Collective.

    Raises UserError where a disk gave no answer: the file may be whole, and nothing is removed.
    """
    result, problem, silent = None, "", ""
    try:
        result = step()
    except Unusable as error:
        problem = str(error)
    except OSError as error:
        file = Path(error.filename).name if error.filename else MANIFEST
        silent = f"{file}: {error.strerror}"
    if silent := _first(gather(silent)):
        raise UserError(
            f"checkpoint {name} cannot be read now ({silent}): try again, or remove it to go on "
            "from the one before"
        )
    return result, _first(gather(problem))


def _first(problems: list[str]) -> str:
    for rank, problem in enumerate(problems):
        if problem:
            everywhere = all(p == problem for p in problems)
            return problem if everywhere else f"rank {rank}: {problem}"
    return ""
