"""Every method to several targets: one run serves them all, and a row may have its own graph."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import reader
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import rivals

ROWS = ("oldsgd", "oldsgd:fragments=tau", "ldsgd", "noloco@one-peer-exponential")
WORDS = [
    "rivals", "--task", "logistic", "--agents", "3", "--iterations", "24", "--jobs", "1", "--alpha",
    "0.05", "--tau", "1", "2", "--partition", "iid", "--c", "1", "8", "--seeds", "0", "1",
    "--algorithm", *ROWS,
]  # fmt: skip


def test_one_run_serves_all_targets(tmp_path: Path) -> None:
    study.main([*WORDS, "--targets", "0.2", "0.4", "0.99", "--out", str(tmp_path)])
    runs = reader.read(sorted(p.parent for p in tmp_path.glob("runs/*/config.json")))
    # At tau = 1 oldsgd in fragments is oldsgd; two seeds.
    assert len(runs) == 2 * (2 * len(ROWS) - 1)
    graphs = {(r.config["algorithm"]["name"], r.config["options"]["topology"]) for r in runs}
    assert ("noloco", "one-peer-exponential") in graphs and ("ldsgd", "ring") in graphs
    lines = list(csv.DictReader((tmp_path / "rivals" / "times.csv").open()))
    assert len(lines) == 3 * 2 * 2 * len(ROWS)
    by = {(x["target"], x["c"], x["algorithm"], x["tau"]): x for x in lines}
    for row in ROWS:
        early, late = (float(by[goal, "1.0", row, "2"]["time"]) for goal in ("0.2", "0.4"))
        assert early <= late and by["0.99", "1.0", row, "2"]["time"] == ""
    slow = by["0.4", "8.0", "ldsgd", "2"]
    assert float(slow["least"]) <= float(slow["time"]) <= float(slow["most"])
    # The time is the replayed one: with tau = 2 a round takes 2 + 8, at c = 1 it takes 3.
    fast = by["0.4", "1.0", "ldsgd", "2"]
    assert float(slow["time"]) / float(fast["time"]) == pytest.approx(10 / 3)
    report = (tmp_path / "rivals" / "report.md").read_text()
    assert "](rivals.png)" in report and (tmp_path / "rivals" / "rivals.png").stat().st_size > 0
    assert "| ldsgd |" in report and "1.64" in report and "## Where a rival is ahead" in report
    again = [*WORDS, "--targets", "0.2", "0.4", "0.99", "--out", str(tmp_path), "--dry-run"]
    with pytest.raises(SystemExit) as stop:
        study.main(again)
    assert stop.value.code == 0


def test_each_method_takes_its_best_step_size(tmp_path: Path) -> None:
    words = [w for w in WORDS if w not in ("--alpha", "0.05")]
    words += [
        "--seeds",
        "0",
        "--target",
        "0.4",
        "--alphas",
        "0.001",
        "0.05",
        "--out",
        str(tmp_path),
    ]
    study.main([*words, "--algorithm", "oldsgd", "ldsgd"])
    lines = list(csv.DictReader((tmp_path / "rivals" / "times.csv").open()))
    assert {line["alpha"] for line in lines if line["time"]} == {"0.05"}
    assert {line["alpha"] for line in lines} == {"0.001", "0.05"}
    assert "alpha 0.05" in (tmp_path / "rivals" / "time-0.4.csv").read_text()


def line(time: float | None) -> dict[str, object]:
    return {"time": time, "tau": 5, "least": time, "most": time}


def test_our_fastest_counts_and_what_is_not_reached_is_left_out() -> None:
    best = {
        (0.5, "iid", 1.0): {"oldsgd": line(9.0), "xoldsgd": line(6.0), "lsgd": line(12.0)},
        (0.5, "iid", 5.0): {"oldsgd": line(4.0), "xoldsgd": line(None), "lsgd": line(32.0)},
        (0.6, "iid", 1.0): {"oldsgd": line(8.0), "xoldsgd": line(9.0), "lsgd": line(4.0)},
        (0.6, "iid", 5.0): {"oldsgd": line(8.0), "xoldsgd": line(9.0), "lsgd": line(None)},
    }
    (found,) = rivals.against(best, (0.5, 0.6))
    slower = {(*where[:2], 20.0): lines for where, lines in best.items() if where[2] == 5.0}
    (more,) = rivals.against({**best, **slower}, (0.5, 0.6))
    assert more["to 0.5, c = 1, 5"] == found["to 0.5"] and more["to 0.5"] == "5.04 (3)"
    assert found == {"rival": "lsgd", "to 0.5": "4.00 (2)", "to 0.6": "0.50 (1)", "paper": 1.98}
    assert rivals.behind(best) == ["- to 0.6, iid, c = 1: lsgd takes 0.50 of our time"]


def test_refused() -> None:
    with pytest.raises(UserError, match="--targets or --target, not both"):
        rivals.Options(target=0.5, targets=(0.5,))
    with pytest.raises(UserError, match="--targets must be positive"):
        rivals.Options(targets=(0.0,))
    with pytest.raises(UserError, match="--alphas or --alpha, not both"):
        rivals.Options(alpha=0.1, alphas=(0.1,))
    with pytest.raises(UserError, match="--alphas must be positive"):
        rivals.Options(alphas=(-1.0,))


def test_a_graph_that_there_is_not_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.main([*WORDS, "--algorithm", "oldsgd", "ldsgd@nowhere", "--out", str(tmp_path)])
    assert "no topology 'nowhere'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
