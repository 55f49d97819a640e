"""A real Slurm, started once for all tests in this folder; skipped where it cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.slurm_cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.stop()
