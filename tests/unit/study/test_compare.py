"""`simulate --algorithm all`: who gets which option, and what is left when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd import algorithms
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.plot import style
from hpc_oldsgd.runs import reader
from hpc_oldsgd.study import compare

WORDS = ["--algorithm", "all", "--task", "logistic", "--agents", "3", "--iterations", "4"]
WORDS += ["--tau", "2", "--eval-samples", "20"]


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "available", lambda: False)


def test_options_go_to_the_algorithms_that_have_them() -> None:
    more = ["--form", "gradient", "--eta-s=0.5", "--eta", "0.7", "--beta", "0.3"]
    config, made, _ = compare.read_options([*WORDS, *more])
    own: dict[str, Any] = {name: a.options() for name, a in made.items()}
    assert list(made) == list(algorithms.names()) and config.agents == 3
    assert own["oldsgd"]["form"] == "gradient" and own["kgt"]["eta_s"] == 0.5
    assert own["lugt"]["eta"] == own["olgt"]["eta"] == 0.7
    assert own["co2"]["beta"] == own["led"]["beta"] == 0.3
    assert own["ldsgd"] == {"tau": 2} and own["dsgd"]["tau"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--eta-s", "x"], "--eta-s"), (["--etas", "1"], "Unknown option"), (["--tau", "0"], "tau")],
)
def test_a_wrong_option_is_refused_before_anything_is_written(
    words: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        compare.compare([*WORDS, *words, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_only_the_value_of_algorithm_is_replaced(tmp_path: Path) -> None:
    words = compare.words_for(["--algorithm=all", "--out", "all", "--c", "1"], "kgt", {"--c"})
    assert words == ["--out", "all", "--algorithm", "kgt"]


def test_what_is_done_stays_when_one_is_refused_and_one_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--late reuse does not fit lsgd; the table says so, and is there before the end."""
    out, seen = tmp_path / "run", []

    class Counted(compare.Session):
        def run(self) -> Any:
            if self.runner.algorithm.name == "oled":
                raise KeyboardInterrupt
            seen.append(self.runner.algorithm.name)
            return super().run()

    monkeypatch.setattr(compare, "Session", Counted)
    with pytest.raises(KeyboardInterrupt):
        compare.compare([*WORDS, "--late", "reuse", "--out", str(out)])
    table = (out / "compare.md").read_text()
    assert "| lsgd | --late reuse leaves out edges" in table and "| oldsgd | " in table
    assert "oldsgd" in seen and "olgt" in seen
    drawn = {run.config["algorithm"]["name"] for run in reader.read([out])}
    assert {"oldsgd", "kgt"} <= drawn and "lsgd" not in drawn
    assert [p.name for p in out.iterdir() if p.name.startswith(".")] == [".lock"]


def test_what_all_refuse_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rings"):
        compare.compare([*WORDS, "--topology", "rings", "--out", str(tmp_path / "run")])
