"""Whether a run ended with the bits of the run that was left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ...checkpoints import store
from ...checkpoints.store import Checkpoint
from ...errors import UserError

WALL = {
    "time", "step_s", "samples_per_s", "training_s", "eval_s", "transfer", "exposed", "hidden",
    "seconds", "elapsed",
}  # fmt: skip
"""Measured with a clock: no two runs share them."""


def newest(run: Path) -> Checkpoint:
    """A run's newest checkpoint with every part intact. Raises UserError."""
    found = store.choose(
        run, lambda f: list(range(f.count)), lambda text: [text], lambda text: None
    )
    if found is None:
        raise UserError(f"{run} has no checkpoint")
    return found


def difference(whole: Path, run: Path, rows_lost: bool = False) -> str:
    """In words; nothing where model, optimizer, corrections and metrics are the same.

    `rows_lost`: metrics.jsonl was damaged on purpose, and what was in it may be missing.
    """
    try:
        expected, found = map(newest, (whole, run))
        summaries = [
            _without_clock(json.loads((each / "summary.json").read_text())) for each in (whole, run)
        ]
    except (UserError, OSError, ValueError) as error:
        return f"no whole result: {error}"
    if found.r != expected.r:
        return f"the last checkpoint is of round {found.r}, not {expected.r}"
    for part in range(expected.count):
        if where := unlike(expected.read(part), found.read(part)):
            return f"rank {part} has another {where}"
    rows, found_rows = rows_of(whole), rows_of(run)
    if rows_lost:
        rows = [row for row in rows if row["round"] in {one["round"] for one in found_rows}]
    if rows != found_rows or not rows:
        return f"metrics.jsonl has {len(found_rows)} rows, and not those {len(rows)}"
    if rows_lost:
        summaries = [{**summary, "best": None} for summary in summaries]
    return "" if summaries[0] == summaries[1] else "summary.json is another"


def rows_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [_without_clock(json.loads(line)) for line in lines]


def unlike(a: Any, b: Any, name: str = "state") -> str:
    """The name of the first thing in which two states differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
        return "" if same else name
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return name
        keys = (key for key in a if key not in WALL)
        return next((at for key in keys if (at := unlike(a[key], b[key], f"{name}.{key}"))), "")
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return name
        each = enumerate(zip(a, b, strict=True))
        return next((at for k, pair in each if (at := unlike(*pair, f"{name}[{k}]"))), "")
    same = type(a) is type(b) and (a == b or (a != a and b != b))
    return "" if same else name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is equal to itself, and -0 is not 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _without_clock(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in WALL}
