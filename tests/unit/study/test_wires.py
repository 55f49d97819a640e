"""Narrow wires in a study: what really travels is run, what all-reduces is only timed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import reader
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import wires


def test_each_wire_is_run_and_charged_by_its_bytes(tmp_path: Path) -> None:
    study.main(
        ["wires", "--task", "logistic", "--agents", "3", "--iterations", "12", "--jobs", "1",
         "--alpha", "0.05", "--tau", "2", "--partition", "iid", "--c", "8", "--target", "0.2",
         "--wire", "fp32", "int4", "--algorithm", "oldsgd", "ldsgd", "lsgd", "--out", str(tmp_path)]
    )  # fmt: skip
    runs = reader.read(sorted(p.parent for p in tmp_path.glob("runs/*/config.json")))
    sent = sorted((r.config["algorithm"]["name"], r.config["options"]["wire"]) for r in runs)
    # Two seeds; lsgd all-reduces, so it is run once and charged twice.
    assert sent == sorted(
        2 * [("oldsgd", "same"), ("oldsgd", "int4"), ("ldsgd", "same"), ("ldsgd", "int4"),
             ("lsgd", "same")]
    )  # fmt: skip
    assert all(run.rows[-1]["iteration"] == 12 for run in runs), "a run goes past its target"
    lines = list(csv.DictReader((tmp_path / "wires" / "times.csv").open()))
    by = {(line["algorithm"], line["wire"]): float(line["time"]) for line in lines}
    rounds = by["lsgd", "fp32"] / (2 + 4 / 3 * 8)
    assert rounds == pytest.approx(round(rounds))
    assert by["lsgd", "int4"] == pytest.approx(rounds * (2 + 4 / 3 * 8 * wires.SHARE["int4"]))
    assert wires.SHARE["int4"] <= 0.14 and wires.SHARE["int8"] <= 0.27
    learned = list(csv.DictReader((tmp_path / "wires" / "learning.csv").open()))
    assert [line["algorithm"] for line in learned] == ["oldsgd", "ldsgd"]
    for line in learned:
        assert " to " in line["consensus, fp32"] and line["loss, int4"]
        assert line["consensus, int4"] != line["consensus, fp32"]


def test_the_best_tau_and_wire_of_each_row() -> None:
    one = {"partition": "iid", "c": 5.0, "algorithm": "oldsgd", "least": 1.0, "most": 9.0}
    times = [
        {**one, "wire": "fp32", "tau": 5, "time": 7.0},
        {**one, "wire": "int4", "tau": 1, "time": 4.0},
        {**one, "wire": "int8", "tau": 1, "time": None},
    ]
    told = "4 (tau 1, int4; 1 to 9)"
    assert wires.best(times) == [{"algorithm": "oldsgd", "iid, c = 5": told}]


def test_refused() -> None:
    with pytest.raises(UserError, match="study wires is simulated"):
        wires.Options(mpi=True)
    with pytest.raises(UserError, match="--wire must name"):
        wires.Options(wire=())
