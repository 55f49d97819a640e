"""python -m hpc_oldsgd.data"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from hpc_oldsgd.data import Label, __main__, histogram
from hpc_oldsgd.tasks import Digits


def run(monkeypatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["data", *argv])
    __main__.main()


def test_counts_are_those_of_the_shards(monkeypatch, capsys):
    run(monkeypatch, "--partition", "label:0.5", "--agents", "4", "--seed", "3", "--json")
    said = json.loads(capsys.readouterr().out)
    task = Digits()
    expected = [
        np.bincount(task.shard(i, 4, Label(0.5), 3).rows[1], minlength=10).tolist()
        for i in range(4)
    ]
    assert said == {"labels": [str(k) for k in range(10)], "counts": expected}


def test_the_table_and_the_picture(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--partition", "label", "--agents", "9", "--plot", str(tmp_path / "a.png"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits, label, 9 agents, seed 0"
    assert [line.split()[0] for line in lines[2:12]] == [*map(str, range(9)), "all"]
    assert lines[11].split()[1] == "1438"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("labels", [1, 10, 20, 600])
@pytest.mark.parametrize("agents", [1, 3])
def test_any_number_of_labels_is_drawn(tmp_path, labels, agents):
    table = np.random.default_rng(0).integers(1, 9, (agents, labels))
    names = [str(k) for k in range(labels)]
    histogram.save(table, names, "title", tmp_path / "b.svg")
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert len(histogram.text(table, names).splitlines()) == agents + 2


def test_skew():
    same = np.array([[2, 2], [5, 5]])
    apart = np.array([[4, 0, 0], [0, 4, 4]])
    assert histogram.skew(same).tolist() == [0, 0]
    assert np.allclose(histogram.skew(apart), [2 / 3, 1 / 3])


@pytest.mark.parametrize(
    "argv",
    [
        ["--partition", "labl"],
        ["--agents", "0"],
        ["--task", "digit"],
        ["--agents", "1439"],
        ["--plot", "nowhere/a.png"],
    ],
)
def test_mistakes_are_one_line_and_exit_2(monkeypatch, capsys, tmp_path, argv):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
