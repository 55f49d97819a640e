"""Rows of a study with options of their own, and the schedules that `study timeline` draws."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpc_oldsgd import algorithms, cli
from hpc_oldsgd.algorithms import OLDSGD, XOLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.plot import style
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import grid as grids
from hpc_oldsgd.study import rows, speedup, timeline


def test_a_row_is_an_algorithm_with_options() -> None:
    assert rows.make("oldsgd", 3) == OLDSGD(tau=3)
    assert rows.make("oldsgd:fragments=tau", 4) == OLDSGD(tau=4, fragments=4)
    both = rows.make("xoldsgd:fragments=2,gamma=0.3", 5)
    assert both == XOLDSGD(tau=5, fragments=2, gamma=0.3)
    assert rows.make("oldsgd:fragments=5", 3) is None, "more fragments than steps"
    assert rows.make("dsgd", 2) is None
    assert rows.make("oldsgd:fragments=tau@exponential", 4) == OLDSGD(tau=4, fragments=4)
    assert (
        rows.algorithm("oldsgd@torus:3x3") == "oldsgd"
        and rows.graph("oldsgd@torus:3x3") == "torus:3x3"
    )
    assert rows.graph("oldsgd:fragments=tau") == ""
    rows.check("oldsgd:fragments=5")
    rows.check("dsgd")


def test_every_row_has_those_with_fragments_once_more() -> None:
    listed = rows.every()
    plain = [row for row in listed if ":" not in row]
    assert plain == algorithms.names()
    more = [row for row in listed if ":" in row]
    in_fragments = ("oldsgd", "xoldsgd", "moldsgd")  # dsgd_cta has one step
    assert more == [f"{name}:fragments=tau" for name in in_fragments]
    assert listed.index(more[0]) == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("oldsgd:fragment=5", "Unknown option --fragment; did you mean --fragments?"),
        ("oldsgd:fragments=many", "Cannot read --fragments many"),
        ("xoldsgd:gamma=2", "gamma must be at least 0 and below 1"),
        ("oldsdg:fragments=2", "did you mean oldsgd?"),
    ],
)
def test_a_wrong_row_is_refused(row: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        cli.parse(speedup.Options, ["--algorithm", "oldsgd", row])
    assert says in str(error.value)


def test_rows_of_one_algorithm_are_other_runs_and_other_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "available", lambda: False)
    words = ["--task", "logistic", "--agents", "3", "--iterations", "12", "--jobs", "1", "--c", "1"]
    words += ["--partition", "iid", "--out", str(tmp_path), "--algorithm"]
    words += ["oldsgd", "oldsgd:fragments=tau"]
    study.main(["speedup", *words, "--target", "0.2", "--tau", "1", "3"])
    with (tmp_path / "speedup" / "by_tau.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["algorithm"] for line in table] == ["oldsgd", "oldsgd:fragments=tau"]
    assert len(list((tmp_path / "runs").iterdir())) == 3, "at tau = 1 they are the same run"
    assert len(list((tmp_path / "runs").glob("oldsgd-tau3-P3-*"))) == 1
    assert "--fragments 3" in (tmp_path / "speedup" / "commands.sh").read_text()
    study.main(["convergence", *words, "--tau", "3"])
    with (tmp_path / "convergence" / "final-iid.csv").open() as file:
        a, b = csv.DictReader(file)
    assert b["algorithm"] == "oldsgd:fragments=tau"
    assert float(a["consensus"]) > float(b["consensus"])
    assert a["time, c = 1"] == b["time, c = 1"] == "12.0"


def test_a_study_can_ask_for_the_whole_test_set() -> None:
    asked = grids.Grid(cli.parse(speedup.Options, ["--options=--final-test"])).cell("oldsgd", 5)
    usual = grids.Grid(cli.parse(speedup.Options, [])).cell("oldsgd", 5)
    assert asked is not None and asked.options.final_test
    assert usual is not None and not usual.options.final_test and usual.key == asked.key


def test_schedules_in_simulated_time(tmp_path: Path) -> None:
    words = ["timeline", "--agents", "4", "--c", "5", "--out", str(tmp_path), "--algorithm"]
    study.main([*words, "ldsgd", "oldsgd", "oldsgd:fragments=tau", "oldsgd:fragments=2", "lsgd"])
    with (tmp_path / "timeline.csv").open() as file:
        table = list(csv.DictReader(file))
    at = {line["algorithm"]: line for line in table}
    assert [float(line["a round takes"]) for line in table] == [
        10,
        5,
        5,
        5.5,
        12.5,
    ]  # a half has two steps
    ages = {name: float(line["age of what is mixed"]) for name, line in at.items()}
    assert ages.pop("oldsgd:fragments=2") == pytest.approx(22 / 9)
    assert ages == {"ldsgd": 0, "oldsgd": 5, "oldsgd:fragments=tau": 1, "lsgd": 0}
    assert [line["gradients in 25"] for line in table] == ["15", "25", "25", "22", "10"]
    assert at["oldsgd"]["waiting"] == "0%" and at["lsgd"]["waiting"] == "60%"
    assert (tmp_path / "timeline.png").stat().st_size and (tmp_path / "timeline.svg").stat().st_size


def test_a_schedule_waits_where_the_messages_are_longer() -> None:
    options = timeline.Options(tau=2, c=6.0, agents=3)
    seen = timeline.watched("oldsgd:fragments=tau", options, 2)
    assert seen.round == 6 and seen.P == 2
    assert seen.gradients[:2] == [(0, 1), (3, 4)]
    assert seen.waits[:2] == [(1, 3), (4, 6)]
    assert [(s.start, s.end, s.share) for s in seen.sent[:2]] == [(0, 3, 0.5), (3, 6, 0.5)]
    with pytest.raises(UserError, match="dsgd does not fit --tau 5"):
        timeline.Options(algorithm=("dsgd",))
