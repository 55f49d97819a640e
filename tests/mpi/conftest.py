"""Every rank runs every test, and all ranks pass or fail it together.

After each phase of a test the ranks agree on its outcome, so that one rank's failure does not
leave the next test's collectives with nobody to meet. A rank that fails while the others stand
inside a collective cannot be agreed with: it prints its error and ends the job.

    @pytest.mark.ranks(2)       skip with fewer ranks
    @pytest.mark.ranks(1, 3)    skip with fewer or more
    def test_it(comm): ...      comm is the world
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
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


@pytest.fixture
def shared_path(tmp_path: Path) -> Iterator[Path]:
    """One folder for all ranks: rank 0's."""
    path: Path = agreement.bcast(tmp_path)
    yield path
    agreement.Barrier()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(least, most): skip on fewer or more ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S, method="thread"))
        for mark in item.iter_markers("ranks"):
            least, most = (*mark.args, world.size)[:2]
            if not least <= world.size <= most:
                item.add_marker(pytest.mark.skip(reason=f"not meant for {world.size} ranks"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if world.size > 1 and Path(__file__).parent in item.path.parents:
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
