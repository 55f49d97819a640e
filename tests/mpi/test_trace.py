"""The clocks of ranks, brought together for a trace."""

from __future__ import annotations

import time

import pytest
from mpi4py import MPI

from hpc_oldsgd.transport.mpi import requests


def test_ranks_of_one_machine_share_a_clock(comm):
    assert requests.clock_offset(comm) == 0.0


@pytest.mark.ranks(2)
def test_offsets_of_machines_that_differ(comm, monkeypatch):
    """Rank i pretends to be a machine whose clock is 1000 i seconds ahead."""

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + 1000.0 * comm.rank

    monkeypatch.setattr(requests, "time", Clock)
    monkeypatch.setattr(MPI, "Get_processor_name", lambda: f"machine{comm.rank}")
    offset = requests.clock_offset(comm)
    assert offset == pytest.approx(-1000.0 * comm.rank, abs=1.0)
    assert (offset == 0.0) == (comm.rank == 0)
