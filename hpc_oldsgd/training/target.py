"""When a run has reached its target: the number that a task is judged by, and its direction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

Direction = Literal["max", "min"]


def best(values: Iterable[float | None], direction: Direction) -> float | None:
    """None and NaN are no values."""
    known = [v for v in values if v is not None and not math.isnan(v)]
    return (max if direction == "max" else min)(known, default=None)


def met(target: float | None, value: float | None, direction: Direction) -> bool:
    """Whether a value is at the target or beyond it; never without a target or a value."""
    if target is None or value is None:
        return False
    return value >= target if direction == "max" else value <= target
