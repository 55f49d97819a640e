"""Run folders as a figure needs them: rows of numbers, a label, which clock the times are of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..files import read_regular

Clock = Literal["wall", "simulated"]


@dataclass
class Run:
    """One line of a figure."""

    path: Path
    rows: list[dict[str, Any]]
    clock: Clock
    config: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    line: int = 0  # colour and dashes, the same in all figures
    ended: bool = True

    @property
    def trace(self) -> Path | None:
        path = self.path / "trace.json"
        return path if path.is_file() else None

    def values(self, key: str, factor: float = 1.0) -> list[float]:
        """A column; what a row does not have, or is not finite, is a gap."""
        column: list[Any] = [row.get(key) for row in self.rows]
        return [float(v) * factor if finite(v) else math.nan for v in column]

    def has(self, key: str) -> bool:
        return any(row.get(key) is not None for row in self.rows)


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders; a folder that is named twice counts once."""
    unique = {path.resolve(): path for path in paths}
    return [run for path in unique.values() for run in read_one(path)]


def read_one(path: Path) -> list[Run]:
    """One run, or one for each algorithm of `simulate --algorithm all`."""
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder." if path.exists() else f"There is no folder {path}."
        )
    if not (path / "metrics.jsonl").is_file():
        inside = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
        hint = f"; there are runs inside it, as {path / inside[0]}" if inside else ""
        raise UserError(f"{path} holds no run: there is no metrics.jsonl in it{hint}.")
    rows = read_rows(path / "metrics.jsonl")
    if rows and isinstance(rows[0].get("algorithm"), str):
        names = dict.fromkeys(str(row.get("algorithm")) for row in rows)
        return [
            Run(
                path, [row for row in rows if row.get("algorithm") == name], "simulated",
                {"algorithm": {"name": name}},
            )
            for name in names
        ]  # fmt: skip
    config = read_object(path / "config.json")
    # Written last: without it the run is still going, or was stopped.
    ended = (path / "summary.json").is_file()
    summary = read_object(path / "summary.json") if ended else {}
    # The virtual clock's option c belongs to simulate alone.
    options = config.get("options")
    simulated = isinstance(options, dict) and "c" in options
    unit = summary.get("time_unit", "units" if simulated else "s")
    clock: Clock = "wall" if unit == "s" else "simulated"
    return [Run(path, in_order(rows), clock, config, ended=ended)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows so far; the last one may still be on its way to the disk."""
    rows = []
    for number, row in parsed_lines(path):
        if row is None or not isinstance(row.get("iteration"), (int, float)):
            if number is None:
                break
            raise UserError(f"{path}, line {number}, is not a row of metrics.")
        if finite(row["iteration"]):
            rows.append(row)
    return rows


def parsed_lines(path: Path) -> Iterator[tuple[int | None, dict[str, Any] | None]]:
    """The number and the object of each line; None for the object of a line that is not one.

    A last line without a newline has no number: it may still be on its way to the disk.
    """
    *lines, last = read_bytes(path).split(b"\n")
    for number, line in [*enumerate(lines, 1), (None, last)]:
        if line.strip():
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            yield number, content if isinstance(content, dict) else None


def finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run that was killed and resumed repeats rows: the later ones count."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["iteration"] >= row["iteration"]:
            kept.pop()
        kept.append(row)
    return kept


def read_object(path: Path) -> dict[str, Any]:
    text = read_bytes(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): the file is damaged.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: the file is damaged.")
    return content


def read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no whole run: there is no {path.name}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
