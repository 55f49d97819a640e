"""Slow agents and jitter: the same flags and the same draws for the simulator and over MPI."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hpc_oldsgd.bench import overlap
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.slowdown import Drag, slowdowns
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions


def test_factors_by_agent():
    assert slowdowns(("1:2.5", "3:0.5"), 4) == [1.0, 2.5, 1.0, 0.5]
    assert SimulateOptions(agents=2, slow=("1:4",)).speeds() == [1.0, 0.25]


@pytest.mark.parametrize("bad", ["1", "x:2", "1:", "4:2", "-1:2", "1:0", "1:-2", "1:nan", "1:inf"])
def test_bad_factors_are_refused(bad):
    with pytest.raises(UserError, match="--slow"):
        slowdowns((bad,), 4)


@pytest.mark.parametrize(
    "bad",
    [{"jitter": -1.0}, {"jitter": float("inf")}, {"late_wait": -1.0}, {"staleness": 0}],
    ids=str,
)
def test_one_set_of_options_for_all(bad):
    for kind in (TrainOptions, SimulateOptions, overlap.Options):
        with pytest.raises(UserError, match=next(iter(bad)).replace("_", "-")):
            kind(**bad)


@pytest.mark.parametrize("jitter", [0.0, 0.4])
def test_a_rank_draws_what_the_simulator_draws(jitter):
    n, seed = 5, 3
    clock = Clock(n, speed=1 / np.array(slowdowns(("2:3",), n)), jitter=jitter, seed=seed)
    ranks = [Drag(("2:3",), jitter, seed, n, i) for i in range(n)]
    for _ in range(4):
        before = clock.t
        clock.compute()
        expected = clock.t - before
        np.testing.assert_allclose([rank.factor() for rank in ranks], expected, rtol=1e-12)


def test_a_slow_rank_sleeps_what_its_gradient_lacks():
    start, polls = time.perf_counter(), []
    drag = Drag(("0:4",), 0.0, 0, 2, 0)
    drag.poll = lambda: polls.append(time.perf_counter())
    drag.after(0.01)
    assert time.perf_counter() - start >= 0.03
    assert polls  # about one a millisecond where the machine has time for it
    polls.clear()
    Drag((), 0.0, 0, 2, 1).after(1e9)  # nothing asked for: no sleep
    drag = Drag(("0:0.5",), 0.0, 0, 2, 0)
    drag.after(1e9)  # a real gradient cannot be made shorter
    assert time.perf_counter() - start < 30
