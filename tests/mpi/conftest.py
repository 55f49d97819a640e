"""What pytest-mpi lacks: all ranks pass or fail a test together, time limits, quiet ranks, `comm`.

    mpirun -n 2 python -m pytest --with-mpi tests/mpi

Every rank runs every test. After each phase of a test the ranks agree on its outcome, so that one
rank's failure does not leave the next test's collectives with nobody to meet. A rank that fails
while the others stand inside a collective cannot be agreed with: it prints its error and ends the
job. Rank 0 alone reports; what the others have to say of a failure is in its report.

    @pytest.mark.mpi(min_size=2)    of pytest-mpi: skip with fewer ranks
    @pytest.mark.max_ranks(3)       ours: skip with more
    def test_it(comm): ...          comm is the world
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

LIMIT_S = 60.0  # per test; generous, since nine ranks share two cores
FAILED_ALONE_S = 20.0  # how long a failed rank waits for the others to come
PASSED, SKIPPED, FAILED = 0, 1, 2

world = MPI.COMM_WORLD
agreement = world.Dup()  # nobody else's messages are here


@pytest.fixture
def comm() -> MPI.Comm:
    return world


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "max_ranks(n): skip on more ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_ours, items):
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S, method="thread"))
        if any(world.size > mark.args[0] for mark in item.iter_markers("max_ranks")):
            item.add_marker(pytest.mark.skip(reason=f"not meant for {world.size} ranks"))


def is_ours(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Nothing but time limits and lonely errors is printed on other ranks than 0 from here on."""
    if world.rank > 0 and not session.testsfailed:  # or this rank could not read the tests
        session.config.option.no_summary = True
        session.config.option.verbose = -2


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (report.outcome, "", "") if world.rank > 0 else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if world.size > 1 and is_ours(item):
        _agree(report)
    return report


def _agree(report: pytest.TestReport) -> None:
    own = {"passed": PASSED, "skipped": SKIPPED}.get(report.outcome, FAILED)
    worst, best = np.array([own]), np.array([own])
    requests = [
        agreement.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX),
        agreement.Iallreduce(MPI.IN_PLACE, best, MPI.MIN),
    ]
    limit_s = time.monotonic() + (FAILED_ALONE_S if own == FAILED else 10 * LIMIT_S)
    while not MPI.Request.Testall(requests):
        time.sleep(5e-4)
        if time.monotonic() > limit_s:
            print(f"\n{report.nodeid}, {report.when}: rank {world.rank} is alone with its outcome")
            print(report.longreprtext)
            sys.stdout.flush()
            world.Abort(1)
    if worst[0] == best[0] != FAILED:
        return
    texts = agreement.allgather((report.outcome, report.longreprtext))
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for j, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(str(j))
    report.outcome = "failed"
    report.longrepr = "\n".join(
        f"---- rank {', '.join(ranks)}: {outcome} ----\n{text}"
        for (outcome, text), ranks in ranks_of.items()
    )
