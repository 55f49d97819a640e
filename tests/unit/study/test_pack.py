"""Finished runs in one file: a study elsewhere goes on with them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import reader
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import pack
from hpc_oldsgd.study.cells import DIVERGED

WORDS = [
    "speedup", "--task", "logistic", "--agents", "3", "--iterations", "20", "--jobs", "1",
    "--target", "0.2", "--tau", "2", "--partition", "iid", "--algorithm", "oldsgd", "ldsgd",
]  # fmt: skip


def report(out: Path) -> str:
    return (out / "speedup" / "speedup.csv").read_text()


def test_a_study_goes_on_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "new" / "runs.tar.xz"
    study.main([*WORDS, "--out", str(here)])
    unfinished, diverged = (here / "runs" / name for name in ("unfinished", "gone"))
    for path in (unfinished, diverged):
        path.mkdir()
        (path / "config.json").write_text("{}")
    (diverged / DIVERGED).touch()
    study.main(["pack", str(here), str(file)])
    assert "3 runs, 0 of them from before" in capsys.readouterr().out
    study.main([*WORDS, "--also", str(file), "--out", str(there)])
    assert "to go" not in capsys.readouterr().out and not list(there.glob("runs/*"))
    assert report(there) == report(here)
    first = file.read_bytes()
    study.main([*WORDS[:-1], "lsgd", "--out", str(there)])
    study.main(["pack", str(there), str(file)])  # oldsgd's run has the same name in both
    assert "4 runs, 3 of them from before" in capsys.readouterr().out
    study.main(["pack", str(here), str(tmp_path / "again.tar.xz")])
    assert (tmp_path / "again.tar.xz").read_bytes() == first


def test_what_is_packed_is_small_and_says_nothing_of_places(tmp_path: Path) -> None:
    study.main([*WORDS, "--out", str(tmp_path / "here")])
    pack.main(pack.Options(tmp_path / "here", tmp_path / "runs.tar.xz"))
    place = pack.unpacked(tmp_path / "runs.tar.xz")
    assert not [f for f in place.rglob("*.*") if str(tmp_path) in f.read_text()]
    for whole in reader.read([p.parent for p in tmp_path.glob("here/runs/*/config.json")]):
        (small,) = reader.read_one(place / whole.path.name)
        assert small.ended and set(whole.rows[0]) - set(small.rows[0]) == pack.LEFT_OUT
        for key in small.rows[0]:
            assert small.values(key) == pytest.approx(whole.values(key), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "name", ["../out/config.json", "/x/config.json", "a/b/config.json", "a/sh"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "bad.tar.xz"
    with tarfile.open(file, "w:xz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    with pytest.raises(UserError, match="does not belong in it"):
        pack.unpacked(file)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.tar.xz"]


def test_other_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UserError, match="is not a file that study pack wrote"):
        pack.unpacked(tmp_path / "text")
    with pytest.raises(UserError, match="There is no finished run in"):
        pack.main(pack.Options(tmp_path, tmp_path / "runs.tar.xz"))
    with pytest.raises(UserError, match="There is no folder"):
        pack.main(pack.Options(tmp_path / "nowhere", tmp_path / "runs.tar.xz"))
