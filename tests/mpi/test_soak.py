"""A small soak: random stops of ranks, and a verdict that can also be a bad one."""

from __future__ import annotations

import pytest

from hpc_oldsgd.bench import soak

SMALL = {"rounds": 150, "size": 1003, "stop_every": 0.02, "stop_seconds": 0.005}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", ["wait", "reuse"])
def test_a_small_soak_passes(comm, late):
    options = soak.Options(**SMALL, late=late, late_wait=0.001, seed=comm.size)
    verdict = soak.run(comm, options)
    assert verdict["passed"], verdict
    assert verdict["looks"] == 151 and verdict["rounds"] == 150
    assert verdict["compared_with_simulator"] == (late == "wait")


@pytest.mark.ranks(2)
def test_one_number_of_one_rank_spoils_the_verdict(comm):
    """The mean identity and the comparison with the simulator can fail, each by one slip."""

    def spoil(runner):
        if comm.rank == 1 and runner.r == 20:
            runner.x[7] += 1e-4

    verdict = soak.run(comm, soak.Options(**{**SMALL, "rounds": 40, "stop_every": 0.0}), spoil)
    bad = {name for name, ok in verdict["checks"].items() if not ok}
    assert bad == {"the mean identity", "bit for bit the simulator's models"}
    assert not verdict["passed"] and verdict["stops"] == 0
