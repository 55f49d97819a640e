"""A short `bench chaos`: real jobs, killed and resumed to the same bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_oldsgd.bench import chaos
from support import PYTHONPATH
from support.jobs import Mpirun


def test_a_short_chaos_loses_nothing(
    mpirun: Mpirun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    command = os.environ.get("MPIRUN", "")
    options = chaos.Options(faults=8, per_run=8, seed=2, out=tmp_path, mpirun=command)
    found = chaos.count(chaos.run(options, chaos.launcher(command)))
    assert not found["lost"], found
    assert found["faults"] >= 8 and found["jobs"] >= 2
