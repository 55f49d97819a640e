"""How a run ends: its last checkpoint, divergence in its last steps, its target, its start kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_oldsgd import algorithms, simulate
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import Diverged, Stopped
from hpc_oldsgd.tasks.digits import Logistic
from support.bits import same
from support.faults import AskOnce
from support.runs import SHORT, in_memory, last, parse, rows_of, simulated


def test_the_last_checkpoint_is_there_before_the_closing_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole test set may take minutes, in which a job may be killed."""
    there: list[bool] = []
    manifest = store.folder_of(tmp_path / "run", 20) / store.MANIFEST
    evaluate = Logistic.evaluate

    def look(task: Logistic, *args: Any) -> dict[str, float]:
        there.append(manifest.exists())
        return evaluate(task, *args)

    monkeypatch.setattr(Logistic, "evaluate", look)
    simulated(SHORT, tmp_path / "run")
    assert there[-2:] == [True, True] and not there[0]  # training sample and test set


@pytest.mark.parametrize(
    "more", ["", "--wire int4 --tau 5", "--late reuse --staleness 3 --algorithm ldsgd"]
)
def test_divergence_in_the_last_round_is_noticed(tmp_path: Path, more: str) -> None:
    """Nobody counts a vote after the last boundary, so there all open ones are counted."""
    words = f"--task logistic --agents 2 --tau 10 --iterations 10 --alpha 1e20 {more}"
    with pytest.raises(Diverged, match=r"near iteration 10: .*checkpoint is .*round-00000000"):
        simulated(words, tmp_path / "run")
    assert [p.name for p in store.newest_first(tmp_path / "run")] == ["round-00000000"]
    with pytest.raises(Diverged):
        simulated(f"{words} --resume auto", tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_divergence_in_the_last_step_is_noticed(tmp_path: Path) -> None:
    """No gradient was taken at the last models: the closing row tells."""
    words = "--task logistic --agents 2 --tau 1 --iterations 1 --alpha 1e20"
    with pytest.raises(Diverged, match=r"mean model's loss is .* after the last iteration, 1: "):
        simulated(words, tmp_path / "run")
    (row,) = rows_of(tmp_path / "run")
    assert row["train_loss"] > 1e10 and not (tmp_path / "run" / "summary.json").exists()
    assert [p.name for p in store.newest_first(tmp_path / "run")] == ["round-00000000"]
    words = words.replace("1e20", "1e28").replace("logistic", "digits")
    with pytest.raises(Diverged, match=r"loss is nan after .* good checkpoint is .*round-00000000"):
        simulated(words, tmp_path / "nan")
    with pytest.raises(Diverged, match=r"iteration, 1: .*the last checkpoint is .*round-00000001"):
        simulated(f"{words} --keep 1", tmp_path / "one")
    with pytest.raises(Diverged, match=r"iteration, 1: .*the last checkpoint is .*round-00000001"):
        simulated(f"{words} --keep 1 --resume auto", tmp_path / "one")


@pytest.mark.parametrize("name", algorithms.names())
def test_from_the_start_it_is_the_same_run(tmp_path: Path, name: str) -> None:
    words = f"{SHORT} --algorithm {name} --momentum 0.9 --warmup 21 --jitter 0.3 --c 1.7 --keep 99"
    if name.startswith("dsgd"):
        words = words.replace("--tau 2 ", "")
    run = simulated(words, tmp_path / "run")
    start = store.folder_of(run, 0)
    assert store.find(start).r == 0
    simulated(f"{words} --resume {start}", tmp_path / "branch")
    assert store.find(store.folder_of(tmp_path / "branch", 0)).r == 0
    for folder in store.newest_first(run)[:-1]:
        shutil.rmtree(folder)
    kept, rows = last(tmp_path / "branch"), rows_of(run)
    simulated(f"{words} --resume auto", run)
    for other in (run, tmp_path / "branch"):
        assert rows_of(other) == rows and same(last(other)["runner"], kept["runner"])


def test_the_start_is_removed_as_others_are(tmp_path: Path) -> None:
    simulated(f"{SHORT} --keep 1", tmp_path / "run")
    assert [p.name for p in store.newest_first(tmp_path / "run")] == ["round-00000020"]


def test_a_run_that_met_its_target_stays_ended(tmp_path: Path) -> None:
    words = f"{SHORT} --iterations 400 --target 0.5 --alpha 0.05"
    run = simulated(words, tmp_path / "run")
    rows, end = rows_of(run), store.newest_first(run)[0]
    assert rows[-1]["iteration"] < 400 and rows[-2]["test_accuracy"] >= 0.5
    simulated(f"{words} --resume auto", run)
    assert rows_of(run) == rows and store.newest_first(run)[0] == end
    assert json.loads((run / "summary.json").read_text())["round"] == rows[-1]["round"]
    # Another target is asked for now: the run goes on.
    simulated(f"{words} --target 0.8 --resume auto", run)
    assert rows_of(run)[-1]["round"] > rows[-1]["round"]


@pytest.mark.usefixtures("fast_disk")
def test_a_target_met_while_a_checkpoint_is_taken(tmp_path: Path) -> None:
    """Saving first completes the row under way; if that one meets the target, this is the end."""
    words = "--task logistic --iterations 400 --tau 2 --agents 3 --eval-every 3 --target 0.0001"
    # Asked for at boundary 3, counted at 4, when the row of round 3 is under way.
    simulated(words, tmp_path / "run", AskOnce(3, "checkpoint"))
    rows = rows_of(tmp_path / "run")
    assert [row["round"] for row in rows] == [3, 4]
    assert store.newest_first(tmp_path / "run")[0].name == "round-00000004"
    simulated(f"{words} --resume auto", tmp_path / "run")
    assert rows_of(tmp_path / "run") == rows


def test_a_stop_in_the_round_that_diverges_saves_nothing(tmp_path: Path) -> None:
    words = "--task logistic --agents 2 --tau 2 --iterations 40 --alpha 1e20"
    with pytest.raises((Diverged, Stopped)) as ended:
        simulated(words, tmp_path / "run", AskOnce(1))
    assert ended.type is Diverged
    found = store.find(store.newest_first(tmp_path / "run")[0])
    assert found.r == 0 and bool(torch.isfinite(found.read(0)["runner"]["x"]).all())


def test_models_begin_where_the_start_says(tmp_path: Path) -> None:
    """The start's x is the initial model of every agent."""
    asked = parse(f"{SHORT} --keep 99", tmp_path / "run")
    simulate.run(asked)
    x = store.find(store.folder_of(tmp_path / "run", 0)).read(0)["runner"]["x"]
    session = in_memory(asked)
    assert isinstance(session.models[0], nn.Module) and torch.equal(x, session.runner.x)
