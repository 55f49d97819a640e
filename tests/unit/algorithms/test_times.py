"""Round times come out of the schedules and the clock, which know no formula."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpc_oldsgd import algorithms
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.study import costs, formulas, pages, table1
from support import ROOT

GRID = [(tau, c) for tau in (1, 2, 3, 5, 20) for c in (0.0, 0.3, 1.0, 1.5, 2.5, 7.0, 40.0)]


def test_every_algorithm_has_a_formula() -> None:
    assert set(formulas.FORMULAS) == set(algorithms.names())


@pytest.mark.parametrize("n", [4, 9, 16])
@pytest.mark.parametrize("name", algorithms.names())
def test_round_times_follow_the_formulas(name: str, n: int) -> None:
    for tau, c in GRID:
        algorithm = algorithms.with_tau(name, tau)
        if algorithm is not None:
            measured = table1.round_time(algorithm, "ring", n, c)
            expected = formulas.evaluate(name, tau, c, 2 * (n - 1) / n * c)
            assert measured == pytest.approx(expected, abs=1e-9), f"tau = {tau}, c = {c}"


def test_table1_prints_and_writes_formula_beside_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quick", "--agents", "9", "4", "--tau", "5", "--c", "2.5", "--out"]
    study.main(["table1", *options, str(tmp_path)])
    said = capsys.readouterr().out
    assert (tmp_path / "report.md").read_text() in said and "20 cells, about " in said
    assert "Largest difference in 20 cells" in said and (tmp_path / "commands.sh").exists()
    assert "5 / 5" in (tmp_path / "report.html").read_text()
    rows = list(csv.DictReader((tmp_path / "table1.csv").open()))
    several_steps = [name for name in algorithms.names() if not name.startswith("dsgd")]
    for name in ("oldsgd", "xoldsgd", "moldsgd"):
        several_steps.insert(several_steps.index(name) + 1, f"{name}, P = tau")
    assert [r["algorithm"] for r in rows] == several_steps
    assert {(r["n"], r["tau"], r["c"]) for r in rows} == {("4", "5", "2.5")}
    measured = {r["algorithm"]: float(r["measured"]) for r in rows}
    assert measured["oldsgd"] == measured["oldsgd, P = tau"] == 5
    assert measured["lugt"] == 10 and measured["kgt"] == 7.5
    assert measured["lsgd"] == 5 + 1.5 * 2.5 and measured["co2"] == 5
    assert measured["diloco"] == measured["lsgd"] and measured["noloco"] == 7.5


def test_table1_draws_every_n_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study.main(["table1", "--algorithm", "oldsgd", "dsgd", "--agents", "2", "3", "--tau", "1", "2"])
    report = (tmp_path / "studies" / "table1" / "report.md").read_text()
    assert "## n = 2" in report and "## n = 3" in report and "(table1.png)" in report
    assert "| dsgd | 1 + c | 2 / 2 | 6 / 6 | - | - |" in report


def test_table1_fails_where_the_clock_disagrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = formulas.Formula("tau", lambda tau, c, a: tau)
    monkeypatch.setitem(formulas.FORMULAS, "ldsgd", wrong)
    with pytest.raises(SystemExit) as stop:
        study.main(["table1", "--quick", "--out", str(tmp_path)])
    assert stop.value.code == 1


def test_costs_of_some_schedules() -> None:
    counted = {name: costs.count(algorithms.get(name)()) for name in algorithms.names()}
    assert counted["oldsgd"] == costs.Costs(0, 0, 1, 0, 1, 0)
    assert counted["lsgd"] == costs.Costs(0, 0, 0, 1, 0, 1)
    assert (counted["kgt"].state, counted["kgt"].flights, counted["kgt"].exchanges) == (1, 2, 2)
    assert (counted["lugt"].state, counted["lugt"].flights, counted["lugt"].exchanges) == (2, 1, 2)
    assert (counted["olgt"].flights, counted["olgt"].exchanges) == (2, 2)
    assert counted["cocod"].work == 1  # the model at the top of the round
    assert (counted["noloco"].exchanges, counted["noloco"].all_reduces) == (1, 0)
    assert (counted["eager_diloco"].exchanges, counted["eager_diloco"].all_reduces) == (0, 1)


def test_what_a_schedule_makes_is_counted() -> None:
    class Wasteful(algorithms.OLDSGD):
        def schedule(self, agent):  # type: ignore[no-untyped-def]
            kept = [agent.x.clone(), agent.x * 2]
            for _ in agent.rounds():
                yield
                agent.exchange(kept[0] + kept[1]).mix_into(agent.x)

    assert costs.count(Wasteful(tau=1)) == costs.Costs(0, 3, 1, 0, 1, 0)


def test_the_table_in_the_docs_is_up_to_date() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert pages.with_block(text, costs.table(), costs.KEY) == text, (
        "run: python -m hpc_oldsgd.study costs --write docs/algorithms.md"
    )


def test_the_docs_name_every_algorithm() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in algorithms.names():
        assert f"`{name}`" in text, name
