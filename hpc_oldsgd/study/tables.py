"""Tables of records: grouped, compared, written as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]
Table = list[Record]
PERCENT = ("hidden", "strong_efficiency", "weak_efficiency")


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def sooner(base: Record, line: Record) -> float | None:
    """How many times as soon the second is at the target, without measuring where that is known."""
    for key in ("training_to_target", "time_to_target"):
        if base.get(key) is not None and line.get(key) is not None:
            return ratio(base[key], line[key])
    return None


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def pivot(cells: Iterable[tuple[Record, str, Any]]) -> Table:
    """(head, column, value) -> a line for each head, with the values of its columns after it."""
    lines: dict[tuple[Any, ...], Record] = {}
    for head, column, value in cells:
        lines.setdefault(tuple(head.values()), head)[column] = value
    columns = dict.fromkeys(k for line in lines.values() for k in line)
    return [{k: line.get(k) for k in columns} for line in lines.values()]


def short_markdown(table: Table) -> str:
    """What all lines of several share stands above them, once; what none has is left out."""
    known = [k for k in table[0] if any(r[k] is not None for r in table)]
    same = [k for k in known if len(table) > 1 and len({str(r[k]) for r in table}) == 1]
    above = ", ".join(f"{k} {cell(k, table[0][k])}" for k in same)
    rest = markdown([{k: r[k] for k in known if k not in same} for r in table])
    return f"All: {above}.\n\n{rest}" if same else rest


def markdown(table: Table) -> str:
    head = list(table[0])
    lines = [head, ["---"] * len(head), *([cell(k, r[k]) for k in head] for r in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}" if key in PERCENT else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def as_csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
