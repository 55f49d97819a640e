"""The runs behind docs/results.md: every one can be read and ended, and none tells of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_oldsgd.runs import reader
from hpc_oldsgd.study import pack

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docs" / "runs").glob("*.tar.xz"))


def test_the_page_names_each_file() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    assert FILES and all(f"docs/runs/{file.name}" in text for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_packed_runs_can_be_read(file: Path) -> None:
    place = pack.unpacked(file)
    folders = sorted(config.parent for config in place.rglob("config.json"))
    assert all(run.ended and run.rows for run in reader.read(folders)) and len(folders) >= 20
    for text in place.rglob("*.json*"):
        assert '"/' not in text.read_text(), text
