"""Lines of a run's log: whole rounds, a clock that goes on, the time without measuring."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpc_oldsgd.cli.console import summary_lines
from support.runs import SHORT, crash, simulated

SMALL = "--task logistic --agents 2 --tau 2 --eval-samples 20"


def test_iterations_that_end_inside_a_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(f"{SMALL} --iterations 3", tmp_path / "three")
    told = capsys.readouterr()
    assert "tau = 2, c = 1, alpha" in told.out
    assert "--iterations 3 ends inside a round of tau = 2: the run takes 4" in told.err
    assert "iteration 4/4 " in told.out
    simulated(f"{SMALL} --iterations 4 --wire int8", tmp_path / "four")
    told = capsys.readouterr()
    assert "ends inside" not in told.err and "tau = 2, wire int8, c = 1, alpha" in told.out


def test_the_clock_goes_on_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    crash(SHORT, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["eval_s"] += 1000.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    simulated(f"{SHORT} --resume auto", run)
    seconds = [float(s) for s in re.findall(r"\[ *([0-9.]+) s\]", capsys.readouterr().out)]
    assert seconds and min(seconds) >= 1000.0


def test_measuring_is_not_training(tmp_path: Path) -> None:
    summary = {
        "title": "a run", "train_loss": 1.0, "consensus": 0.0, "time_unit": "s", "time": 6.7,
        "iteration": 20, "step_s": 0.1, "training_s": 2.0, "hidden": None,
    }  # fmt: skip
    told = "6.7 s for 20 iterations; 2.0 s without measuring and saving"
    assert told in summary_lines(summary, tmp_path)


def test_a_command_says_that_4_bits_are_too_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line of its own, once. LED spoils this run, and is told of before it explodes."""
    words = "--task digits --algorithm led --tau 1 --agents 4 --iterations 120 --wire int4"
    simulated(f"{words} --eval-samples 20 --threads 1", tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "too few" in line]
    assert line.startswith("hpc_oldsgd.simulate: warning: 4 bits are too few for this run: ")
