"""When a run's rounds would have ended at another c, or with slow agents.

In the simulator no iterate depends on time, so one run serves every clock: its schedule is driven
once more with models of a few numbers, and only the clock is read. That is quick.
Fragments are then equally long; those of a real model may differ by one line (transport.base.LINE).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runs.reader import Run
from ..runs.spec import make_topology
from ..simulation.clock import Times
from ..simulation.trajectory import trajectory
from ..transport.base import LINE
from .cells import Cell

_kept: dict[tuple[Any, ...], Times] = {}


def times(
    cell: Cell, rounds: int, c: float, slow: tuple[str, ...] = (), degree_aware: bool = False
) -> Times:
    """(rounds + 1,): simulated time of the slowest agent at each round boundary."""
    algorithm, options = cell.algorithm, dataclasses.replace(cell.options, slow=slow)
    own = (algorithm.name, *sorted(algorithm.options().items()))
    key = (own, options.topology, options.weights, cell.n, c, slow, degree_aware)
    if key not in _kept or len(_kept[key]) <= rounds:
        x0 = np.zeros((cell.n, LINE * algorithm.P))  # so that fragments are equally long
        whole = max(rounds, -(-cell.iterations // cell.tau))
        _kept[key] = trajectory(
            algorithm, make_topology(options, cell.n), x0, _zero, 1.0, whole, c,
            batched=True, speed=np.array(options.speeds()), degree_aware=degree_aware,
        ).time  # fmt: skip
    return _kept[key][: rounds + 1]


def at(cell: Cell, run: Run, c: float, **clock: Any) -> Run:
    """The run as this clock would have timed it; over MPI the time is what it was.

    `clock`: slow and degree_aware, as in `times`.
    """
    if run.clock == "wall" or not run.rows:
        return run
    time = times(cell, run.rows[-1]["round"], c, **clock)
    rows = [{**row, "time": float(time[row["round"]])} for row in run.rows]
    return dataclasses.replace(run, rows=rows)


def _zero(X: Any, k: Any, _: int = 0) -> NDArray[Any]:
    return np.zeros_like(X)
