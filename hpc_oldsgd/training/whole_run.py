"""What a run's rows say of the whole run: the same numbers in its summary and in every table.

Without torch: tables are made on login nodes too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def hidden(exposed: float, transfer: float) -> float | None:
    """Share of the communication nobody waited for; waking up late may exceed a short transfer."""
    return max(0.0, 1 - exposed / transfer) if transfer > 0 else None


def totals(rows: Sequence[Row]) -> Row:
    """Messages are averaged over the rows. The step is that of the median row; the first row is
    left out, because a run's first steps take longer."""
    waited = [row for row in rows if row.get("hidden") is not None and _number(row, "transfer") > 0]
    transfer = sum(_number(row, "transfer") for row in waited)
    exposed = sum(_number(row, "exposed") for row in waited)
    timed = [row for row in rows[1:] or rows if 0 < _number(row, "step_s") < math.inf]
    timed.sort(key=lambda row: float(row["step_s"]))
    middle = timed[len(timed) // 2] if timed else {}
    return {
        "transfer": transfer / len(waited) if waited else 0.0,
        "exposed": exposed / len(waited) if waited else 0.0,
        "hidden": hidden(exposed, transfer),
        "step_s": middle.get("step_s"),
        "samples_per_s": _number(middle, "samples_per_s") or None,
        "training_s": training_s(rows)[-1] if rows else None,
    }


def training_s(rows: Sequence[Row]) -> list[float | None]:
    """Wall seconds up to each row without measuring and saving; None where a row has no step_s."""
    sums: list[float | None] = []
    total, before = 0.0, 0
    for row in rows:
        total += _number(row, "step_s", math.nan) * (row["iteration"] - before)
        before = row["iteration"]
        sums.append(total if math.isfinite(total) else None)
    return sums


def _number(row: Row, key: str, default: float = 0.0) -> float:
    """Rows are read from files: a missing value, or one that is no number, is the default."""
    value = row.get(key)
    try:
        return float(value) if isinstance(value, (int, float)) else default
    except OverflowError:
        return default
