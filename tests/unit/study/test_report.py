"""What a study's report says, beside the paper, and what a page takes of it."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import grid as grids
from hpc_oldsgd.study import paper, speedup
from hpc_oldsgd.study.report import Report
from support.runs import study_cell as cell

TINY = ["speedup", "--task", "logistic", "--agents", "3", "--iterations", "20", "--jobs", "1"]
TINY += ["--target", "0.2", "--algorithm", "oldsgd", "ldsgd", "--tau", "2", "--partition", "iid"]


def test_report_stands_beside_the_paper(tmp_path: Path) -> None:
    study.main([*TINY, "--out", str(tmp_path), "--c", "1", "5", "2"])
    folder = tmp_path / "speedup"
    text, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for said in ("paper 1.23", "paper 1.26", "What differs", "1,438 training images"):
        assert said in text and said in page
    assert "target: 0.2 test accuracy;" in text
    assert page.count("data:image/png;base64,") == 1 and 'src="http' not in page
    for name in ("speedup.png", "speedup.svg", "by_tau.csv"):
        assert (folder / name).stat().st_size
    assert not (folder / "by_tau.png").exists(), "of one tau there is no line"
    commands = (folder / "commands.sh").read_text()
    assert "python -m hpc_oldsgd.simulate --algorithm ldsgd --task logistic" in commands
    with (folder / "speedup.csv").open() as file:
        ours = [r for r in csv.DictReader(file) if r["algorithm"] == "ldsgd"]
    assert [r["paper, VGG11"] for r in ours] == ["1.23", "1.26", ""]
    off = float(ours[0]["speed-up"]) / 1.23 - 1
    assert ours[0]["against VGG11"] == f"{off:+.0%}"


def test_commands_run_nothing_but_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line break in a folder's name or in the launcher ends no comment."""
    (tmp_path / "python").symlink_to("/bin/true")
    monkeypatch.setattr(sys, "argv", ["study", "speedup", "--out", "a\ntouch one #"])
    cells = [cell(), dataclasses.replace(cell(), mpi=True)]
    report = Report("t", [], cells, launcher="mpirun\ntouch two #")
    report.write(tmp_path, Path("runs\ntouch three #"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["sh", "commands.sh"], cwd=tmp_path, env=env, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert not [name for name in ("one", "two", "three") if (tmp_path / name).exists()]


def test_a_page_takes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    begin, end = "<!-- speed-up-logistic: begin -->", "<!-- speed-up-logistic: end -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    words = [*TINY, "--out", str(tmp_path / "out"), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", ["study", *words])
    for _ in range(2):
        study.main(words)
        text = page.read_text()
        assert text.startswith(f"before\n{begin}\n") and text.endswith(f"{end}\nafter\n")
        assert "old\n" not in text.replace("oldsgd", "") and text.count(begin) == 1
    assert f"{begin}\n\n    python -m hpc_oldsgd.study speedup --task" in text
    assert "--target 0.2 --algorithm oldsgd ldsgd --tau 2 --partition iid\n" in text
    assert str(tmp_path) not in text and "paper 1.23" in text and "cores of" in text
    assert (page.parent / "figures" / "speed-up-logistic-speedup.png").stat().st_size
    assert "(figures/speed-up-logistic-speedup.png)" in text
    page.write_text("nothing\n")
    with pytest.raises(SystemExit) as stop:
        study.main(words)
    assert stop.value.code == 2


def test_commands_name_the_launcher() -> None:
    over_mpi = dataclasses.replace(cell(), mpi=True)
    report = Report("x", [], [over_mpi], "srun --mpi=pmix -n {n}")
    start = "srun --mpi=pmix -n 3 python -m hpc_oldsgd.train --algorithm oldsgd"
    assert start in report.commands(Path("runs"))


def test_the_papers_numbers() -> None:
    assert paper.speedup("iid", "lsgd", "GPT-2", 5.0) == 3.32
    assert paper.speedup("label:0.7", "kgt", "ResNet18", 1.0) == 2.63
    assert paper.speedup("label:0.7", "lsgd", "VGG11", 1.0) is None
    assert paper.speedup("iid", "ldsgd", "VGG11", 3.0) is None
    assert (paper.SCALING["VGG11"], paper.SCALING["ResNet18"]) == (14, 13)


def test_the_best_tau_is_the_first_at_the_target() -> None:
    def line(name: str, tau: int, time: float | None) -> dict[str, Any]:
        return {"algorithm": name, "tau": tau, "iterations": time, "time": time}

    ours = [line("oldsgd", 1, 50), line("oldsgd", 5, 20)]
    others = [line("ldsgd", 1, None), line("ldsgd", 5, 30), line("olgt", 5, None)]
    best = speedup.summary("iid", 1.0, [*ours, *others], "cifar10-vgg11")
    assert [(r["algorithm"], r["best tau"], r["speed-up"]) for r in best] == [
        ("oldsgd", 5, 1.0), ("ldsgd", 5, 1.5), ("olgt", None, None),
    ]  # fmt: skip
    assert best[1]["against VGG11"] == "+22%"


def test_a_report_says_what_is_less_than_the_papers() -> None:
    some = [cell(tau=5, target=0.9)]
    some[0].options.eval_every = 4
    said = "; ".join(paper.differences(some, (5,), 1, []))
    assert "tau: only 5, where the paper takes each algorithm's best of 1, 3, 5, 10" in said
    assert "measured: every 20 iterations (4 rounds), on at most 20 test samples" in said
    both = "; ".join(paper.differences([cell(tau=5), cell(tau=40)], grids.TAUS, 1, []))
    assert "every 5 to 40 iterations (1 round)" in both and "tau: only" not in both
