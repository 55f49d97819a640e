"""Seconds to a target: where a curve meets it, what is not measured twice, and the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import worker
from benchmarks.accuracy.contestants import AUTO, CONTESTANTS, Started
from benchmarks.accuracy.options import EVERYBODY, Options, from_json
from benchmarks.accuracy.report import Results, crossing, figure, reached, table
from benchmarks.accuracy.store import Store, limit_of
from benchmarks.accuracy.task_load import TaskLoad, measure
from hpc_oldsgd import cli
from hpc_oldsgd.errors import UserError


def run(entry: str, seconds: float = 20.0, ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """0.1, 0.5 and 0.9 after 0, 100 and 200 steps."""
    curve = {"iteration": [0, 100, 200], "time": [0, seconds / 2, seconds],
             "value": [0.1, 0.5, 0.9]}  # fmt: skip
    told = {"repeat": 0, "tau": 5, "said": "", "before_s": 0.0, "limit": 60.0}
    return {"entry": entry, "ratio": ratio, **told, **curve, **more}


def cut(entry: str, seconds: float = 20.0, ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """The same, stopped in the middle."""
    whole = run(entry, 2 * seconds, ratio, limit=seconds, **more)
    return {**whole, **{name: whole[name][:2] for name in ("iteration", "time", "value")}}


def made(*runs: dict[str, Any], ratios: tuple[float, ...] = (1.0,), repeats: int = 1) -> Results:
    told = {"task": "digits", "options": "--batch 4", "ranks": 4, "optimizer": "sgd", "alpha": 0.1,
            "momentum": 0.0, "primary": "test_accuracy", "grows": True, "target": 0.7,
            "bytes": 4e6, "t_g": 0.01, "networks": ["1mbit"]}  # fmt: skip
    entries = list(dict.fromkeys(r["entry"] for r in runs))
    kept = {(r["entry"], r["ratio"], r["repeat"]): r for r in runs}
    return Results(told, entries, ratios, repeats, lambda e, r, k: kept.get((e, r, k)))


# -- where a curve meets its target ----------------------------------------------------------------


def test_time_to_target_lies_between_two_points_up_and_down() -> None:
    up = run("oldsgd")
    assert reached(up, 0.7, grows=True) == pytest.approx(15.0)
    assert reached(up, 0.9, grows=True) == pytest.approx(20.0)
    assert reached(up, 0.95, grows=True) is None
    assert crossing(up, "iteration", 0.7, grows=True) == pytest.approx(150.0)
    down = {"time": [0.0, 10.0, 20.0, 30.0], "value": [900.0, 500.0, 300.0, 400.0]}
    assert reached(down, 350.0, grows=False) == pytest.approx(17.5)
    assert reached(down, 300.0, grows=False) == pytest.approx(20.0)
    assert reached(down, 299.0, grows=False) is None


def test_the_first_time_at_the_target_counts_and_no_number_does_not() -> None:
    there_and_back = {"time": [0.0, 1.0, 2.0, 3.0], "value": [0.1, 0.8, 0.2, 0.9]}
    assert reached(there_and_back, 0.45, grows=True) == pytest.approx(0.5)
    lost = {"time": [0.0, 1.0, 2.0], "value": [500.0, float("inf"), 100.0]}
    assert reached(lost, 200.0, grows=False) == pytest.approx(2.0), "nothing lies between"
    assert reached({"time": [0.0, 1.0], "value": [5.0, float("inf")]}, 2.0, grows=False) is None


# -- what is kept ----------------------------------------------------------------------------------


def test_a_finished_cell_is_not_measured_again(tmp_path: Path) -> None:
    options = Options(entry=("oldsgd", "ldsgd", "ddp"), ratio=(1.0, 5.0), repeats=2, target=0.7)
    store = Store(tmp_path, options.identity(), grows=True)
    assert command.progress(options, store) == (0, 12)
    store.write_run(run("oldsgd", 20.0))
    store.write_run(cut("ddp", 45.0))
    again = Store(tmp_path, options.identity(), grows=True)
    # OLDSGD was there after 15 s, so nobody gets more than 45.
    assert command.todo(options, again, 1.0, 0) == ["ldsgd"]
    assert command.todo(options, again, 1.0, 1) == ["oldsgd", "ldsgd", "ddp"]
    assert command.progress(options, again) == (2, 12)
    patient = Options(**{**vars(options), "give_up": 3.5})
    assert command.todo(patient, again, 1.0, 0) == ["ldsgd", "ddp"], "more time than it was given"


def test_limits_follow_the_first_contestant(tmp_path: Path) -> None:
    store = Store(tmp_path, Options(target=0.7).identity(), grows=True)
    assert limit_of(store, "oldsgd", "ddp", 1.0, 0, 60.0, 3.0) == 60.0
    store.write_run(run("oldsgd", 20.0))
    assert limit_of(store, "oldsgd", "ddp", 1.0, 0, 60.0, 3.0) == pytest.approx(45.0)
    assert limit_of(store, "oldsgd", "ddp", 1.0, 0, 30.0, 3.0) == 30.0
    assert limit_of(store, "oldsgd", "oldsgd", 1.0, 0, 60.0, 3.0) == 60.0
    assert limit_of(store, "oldsgd", "ddp", 1.0, 0, 60.0, 0.0) == 60.0
    assert limit_of(store, "oldsgd", "ddp", 5.0, 0, 60.0, 3.0) == 60.0


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    options = Options(target=0.7)
    store = Store(tmp_path, options.identity(), grows=True)
    assert store.link() is None
    store.write_link({"t_g": 0.01, "bytes": 4})
    assert Store(tmp_path, options.identity(), grows=True).link() == {"t_g": 0.01, "bytes": 4}
    with pytest.raises(UserError, match=r"results with --target 0.7, not 0.8"):
        Store(tmp_path, Options(target=0.8).identity(), grows=True)


def test_pilots_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, Options().identity(), grows=True)
    store.write_pilot("post-local SGD", 5.0, {"tau": 20})
    assert store.pilot("post-local SGD", 5.0) == {"tau": 20}
    assert store.pilot("post-local SGD", 1.0) is None


# -- the command line ------------------------------------------------------------------------------


def test_wrong_input_is_one_line() -> None:
    with pytest.raises(UserError, match="There is no nccl"):
        cli.parse(Options, ["--entry", "nccl"])
    with pytest.raises(UserError, match="at least 2"):
        cli.parse(Options, ["--ranks", "1"])
    with pytest.raises(UserError, match="There is no task"):
        cli.parse(Options, ["--task", "digit"])
    with pytest.raises(UserError, match="--size"):
        cli.parse(Options, ["--options=--size tiny"])  # digits has no sizes


def test_options_reach_the_ranks_and_the_task() -> None:
    asked = cli.parse(Options, ["--task", "wikitext2-gpt2", "--options=--size tiny --seq 64"])
    assert asked.primary == ("test_perplexity", False)
    told = {k: v for k, v in vars(asked).items() if k != "output"}
    assert from_json(json.dumps(told)) == asked
    task: Any = asked.make_task()
    assert (task.size, task.seq) == ("tiny", 64)
    assert set(EVERYBODY) <= set(CONTESTANTS) and EVERYBODY[0] == AUTO


# -- the table -------------------------------------------------------------------------------------


def test_table_has_mean_least_and_most() -> None:
    runs = [run("oldsgd", 20.0), run("oldsgd", 24.0, repeat=1)]
    runs += [run("ddp", 60.0, tau=1), run("ddp", 60.0, tau=1, repeat=1)]
    text = table(made(*runs, repeats=2))
    assert "| oldsgd | 16.5 (15.0 to 18.0) |  | 5 |" in text
    assert "| ddp | 45.0 (45.0 to 45.0) | 2.73 | 1 |" in text
    assert text.startswith("digits --batch 4, 4 agents, sgd, alpha 0.1: seconds to a test_accuracy")


def test_one_that_was_cut_is_guessed_by_its_steps_on_another_link() -> None:
    runs = [run("oldsgd"), run("oldsgd", ratio=5.0), run("ddp", 40.0), cut("ddp", 30.0, 5.0)]
    text = table(made(*runs, ratios=(1.0, 5.0)))
    # 150 steps to the target, 0.3 s a step.
    assert "| ddp | 30.0 | 2.00 | 5 | not in 30, about 45 | about 3.00 | 5 |" in text
    other_tau = [*runs[:2], run("ddp", 40.0, tau=1), cut("ddp", 30.0, 5.0)]
    assert "| not in 30 |  | 5 |" in table(made(*other_tau, ratios=(1.0, 5.0)))


def test_a_table_of_what_is_there_so_far() -> None:
    runs = [run("oldsgd", said="ring, int4", before_s=1.2), cut("ldsgd", 30.0, 5.0)]
    text = table(made(*runs, ratios=(1.0, 5.0)))
    assert "| oldsgd | 15.0 |  | 5 | - | - | - |" in text
    assert "| ldsgd | - | - | - | not in 30 |  | 5 |" in text
    assert "oldsgd, message 1, repeat 0: ring, int4 (measured in 1.2 s, not counted)" in text
    half = [run("ldsgd"), cut("ldsgd", 30.0, repeat=1)]
    # Two steps counts, 150 each, and two speeds: 0.1 and 0.3 s a step.
    assert "not in 20, 1 of 2 in 15.0, about 30" in table(made(*half, repeats=2))


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = made(run("oldsgd"), run("ddp"), cut("ldsgd", 5.0, 5.0), ratios=(1.0, 5.0))
    figure(results, tmp_path / "a")
    assert (tmp_path / "a.png").stat().st_size > 5000


# -- one rank --------------------------------------------------------------------------------------


class Alone:
    """The calls of a transport with one rank."""

    rank, n = 0, 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(worker.time, "perf_counter", lambda: self.now)

    def barrier(self) -> float:
        return self.now

    def reduce(self, values: Any, op: str = "sum") -> Any:
        return Result(values)

    def everywhere(self, *values: float) -> Any:
        import numpy as np

        return Result(np.array([values]))


class Result:
    def __init__(self, values: Any) -> None:
        self.result = lambda: values


class Model:
    def flat(self) -> torch.Tensor:
        return torch.zeros(1)


def test_the_clock_stands_between_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Alone(monkeypatch)

    def steps() -> Iterator[None]:
        while True:
            idle.now += 0.5
            yield

    load: Any = Model()
    stretches = worker.segments(Started(steps(), 5), load, idle, every=10, pause=8.0, limit=24.0)
    seen = []
    for copies in stretches:
        seen.append([(t, now) for t, now, _ in copies])
        idle.now += 100.0  # the models are measured
    # 20 steps first, then 8 s each at 0.5 s a step in whole rounds of 5, and no longer than 24 s.
    assert seen[0] == [(0, 0.0), (10, 5.0), (20, 10.0)]
    assert seen[1] == [(30, 15.0), (35, 17.5)]
    assert seen[2:] == [[(40, 20.0), (50, 25.0)]]


def test_copies_are_measured_as_their_mean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import numpy as np

    idle: Any = Alone(monkeypatch)
    idle.n = 2
    load = TaskLoad(Options(ranks=2, test_samples=50), 0)
    x = load.flat()
    for k in range(2):  # what rank 1 left; this rank measures the first copy
        np.save(tmp_path / f"{k}-1.npy", (3 * x).numpy())
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(load, "judge", lambda x: seen.append(x) or 0.25)
    points = measure([(0, 0.0, x), (5, 1.5, x)], load, idle, tmp_path)
    assert points == [[0.0, 5.0], [0.0, 1.5], [0.25, 0.0]]
    assert len(seen) == 1 and torch.allclose(seen[0], 2 * x)
