"""The finished runs of a folder in one small file, for `--also`: a study goes on elsewhere.

Only what a report reads is kept, in six digits: no checkpoints, and nothing of where the runs
were made. The file is the same whenever the runs are.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Any

from .. import cli
from ..errors import UserError
from ..files import write_atomically
from ..runs import reader
from .cells import DIVERGED

KEPT = ("config.json", "metrics.jsonl", "summary.json", DIVERGED)
DIGITS = 6
LEFT_OUT = frozenset({
    "agent_loss", "batch_loss", "consensus_op", "step_s", "samples_per_s", "transfer", "exposed",
    "hidden", "left_out", "eval_s",
})  # fmt: skip
"""Of a row; summary.json has what the whole run took."""
_unpacked: dict[Path, tempfile.TemporaryDirectory[str]] = {}  # until the process ends


@dataclass(frozen=True)
class Options:
    """Put the finished runs of a folder into one file that every study reads with --also."""

    folder: cli.Positional[Path]
    """The folder; runs are found at any depth."""
    file: cli.Positional[Path]
    """The file to write, as runs.tar.xz; what it holds already is kept."""


def main(options: Options) -> None:
    if not options.folder.is_dir():
        raise UserError(f"There is no folder {options.folder}.")
    found = dict(runs(unpacked(options.file))) if options.file.exists() else {}
    before = len(found)
    found |= dict(runs(options.folder))
    if not found:
        raise UserError(f"There is no finished run in {options.folder} yet.")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.file, packed(found))
    size = options.file.stat().st_size / 1e3
    print(f"{options.file}: {len(found)} runs, {before} of them from before, {size:,.0f} kB")


def runs(folder: Path) -> list[tuple[str, Path]]:
    """Name and place of each run that ended, or diverged."""
    found = []
    for config in sorted(folder.rglob("config.json")):
        path = config.parent
        with contextlib.suppress(UserError):
            if (path / DIVERGED).exists() or all(run.ended for run in reader.read_one(path)):
                found.append((path.name, path))
    return found


def packed(found: dict[str, Path]) -> bytes:
    """A tar file that tells nothing of who packed it or when."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in sorted(found.items()):
            for kept in (path / file for file in KEPT):
                if kept.is_file():
                    data = slim(kept)
                    entry = tarfile.TarInfo(f"{name}/{kept.name}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def slim(file: Path) -> bytes:
    if file.name == "metrics.jsonl":
        rows = reader.in_order(reader.read_rows(file))
        kept = ({k: v for k, v in row.items() if k not in LEFT_OUT} for row in rows)
        return b"".join(as_json(row) + b"\n" for row in kept)
    if file.name == DIVERGED:
        return b""
    content = reader.read_object(file)
    if isinstance(content.get("environment"), dict):
        content["environment"].pop("command", None)
    for part in ("options", "task"):
        if isinstance(content.get(part), dict):
            places = {k for k in content[part] if k == "out" or k.endswith("_dir")}
            content[part] |= dict.fromkeys(places)
    return as_json(content)


def as_json(content: Any) -> bytes:
    return json.dumps(rounded(content), separators=(",", ":")).encode()


def rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [rounded(value) for value in content]
    return float(f"{content:.{DIGITS}g}") if isinstance(content, float) else content


def unpacked(file: Path) -> Path:
    """A folder with the runs of a packed file, made once."""
    file = file.resolve()
    if file not in _unpacked:
        place = tempfile.TemporaryDirectory(prefix="hpc_oldsgd-")
        try:
            with tarfile.open(file, "r:xz") as archive:
                for entry in archive:
                    _write(archive, entry, Path(place.name))
        except (tarfile.TarError, LZMAError, EOFError, OSError, ValueError) as error:
            place.cleanup()
            raise UserError(f"{file} is not a file that study pack wrote: {error}") from error
        _unpacked[file] = place
    return Path(_unpacked[file].name)


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, place: Path) -> None:
    """By hand: a name in a file from elsewhere must not lead out of the folder."""
    parts = PurePosixPath(entry.name).parts
    content = archive.extractfile(entry) if entry.isfile() else None
    if content is None or len(parts) != 2 or ".." in parts or parts[1] not in KEPT:
        raise ValueError(f"{entry.name!r} does not belong in it")
    (place / parts[0]).mkdir(exist_ok=True)
    (place / parts[0] / parts[1]).write_bytes(content.read())
