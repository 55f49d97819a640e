"""What is in a run's folder when its disk is full."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hpc_oldsgd.runs.folder import RunFolder, prepare


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    prepare(tmp_path / "run", overwrite=False)
    folder = RunFolder(tmp_path / "run")
    folder.write("config.json", {"seed": 1})
    before = sorted(p.name for p in folder.path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write("config.json", {"seed": "x" * 1000})
        assert folder.summary({"x": "x" * 1000}) == {"summary.json": "File too large"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in folder.path.iterdir()) == before
    assert (folder.path / "config.json").read_text() == '{\n  "seed": 1\n}\n'
    folder.close()
