"""--tau auto: what it chooses where times are known, and how the command lines take it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
import pytest
from torch import nn

from hpc_oldsgd import algorithms, simulate, topology
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.simulation.slowdown import Drag
from hpc_oldsgd.study import compare
from hpc_oldsgd.training import tau_auto, tau_measure
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from hpc_oldsgd.training.tau_auto import Bounds, Pace
from hpc_oldsgd.transport.base import FlightRecord

RING = topology.from_name("ring", 5)
ROUND = {  # the paper's round times less tau: what is left to hide, as a function of tau, c and n
    "oldsgd": lambda tau, c, n: max(c - tau, 0),
    "oled": lambda tau, c, n: max(c - tau, 0),
    "kgt": lambda tau, c, n: max(c - tau, 0),
    "cocod": lambda tau, c, n: max(2 * (n - 1) / n * c - tau, 0),
    "overlap_local_sgd": lambda tau, c, n: max(2 * (n - 1) / n * c - tau, 0),
    "co2": lambda tau, c, n: max(2 * (n - 1) / n * c - tau, 0),
}


def chosen(name: str, c: float, bounds: Bounds = Bounds(), **more: object) -> int:  # noqa: B008
    more = {"margin": 1.0, **more}
    return tau_auto.choose(algorithms.get(name)(), RING, c, bounds, **more).tau  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ROUND)
def test_the_smallest_that_hides(name: str) -> None:
    for c in (0.3, 1.0, 2.5, 7.0):
        expected = next(k for k in range(1, 99) if ROUND[name](k, c, RING.n) <= 1e-6)
        assert chosen(name, c) == expected, c


def test_tracking_sends_twice() -> None:
    """max(tau, 2c); the second message leaves after the first gradient."""
    for c in (0.4, 0.6, 2.0, 3.2):
        assert chosen("olgt", c) == max(1, math.ceil(2 * c)), c


def test_margin_and_bounds() -> None:
    made = tau_auto.choose(algorithms.get("oldsgd")(), RING, 5.0, Bounds())
    assert made.tau == 6 and "5 gradients, 6 with a margin" in made.reason
    assert chosen("oldsgd", 5.0, Bounds(8, 20)) == 8
    cut = tau_auto.choose(algorithms.get("oldsgd")(), RING, 50.0, Bounds(1, 20))
    assert cut.tau == 20 and "--wire bf16" in cut.reason
    one = tau_auto.choose(
        algorithms.get("oldsgd")(), topology.from_name("ring", 1), 50.0, Bounds(1, 20)
    )
    assert one.tau == 1 and "one agent" in one.reason
    assert (
        "waits for one more" in tau_auto.choose(algorithms.get("kgt")(), RING, 2.0, Bounds()).reason
    )


def test_the_slowest_agent_sets_the_pace() -> None:
    assert chosen("oldsgd", 6.0, speed=np.array([1.0, 1.0, 1 / 3, 1.0, 1.0])) == 2
    assert chosen("oldsgd", 3.0, degree_aware=True) == 6


@pytest.mark.parametrize("name", ["ldsgd", "lugt", "led", "lsgd"])
def test_where_nothing_overlaps_there_is_nothing_to_choose(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} stands still"):
        tau_auto.check(algorithms.get(name)(), RING)


def test_one_step_a_round_stays_one() -> None:
    with pytest.raises(UserError, match="tau must be 1"):
        tau_auto.check(algorithms.get("dsgd_cta")(), RING)


def test_a_tau_in_use_is_kept_while_it_does() -> None:
    for tau, c, expected in [(6, 5.0, 6), (9, 5.0, 9), (10, 5.0, 6), (5, 5.0, 6), (3, 0.2, 1)]:
        made = tau_auto.keep(algorithms.get("oldsgd")(tau=tau), RING, c, Bounds())
        assert made.tau == expected, (tau, c)


def test_c_from_seconds() -> None:
    pace = Pace(gradient=0.5, exchange=2.0, all_reduce=4.0)
    assert pace.c({"exchange"}, 4) == 4.0
    assert pace.c({"all_reduce"}, 4) == pytest.approx(4.0 / 0.5 / 1.5)
    assert pace.c(set(), 1) == 0.0
    assert tau_auto.kinds(algorithms.get("co2")(), RING) == {"all_reduce"}
    assert tau_auto.kinds(algorithms.get("kgt")(), RING) == {"exchange"}


def test_flights_under_way_together_count_once() -> None:
    flights = [
        FlightRecord("exchange", 0, posted, completed, 0.0)
        for posted, completed in [(5.0, 6.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.75)]
    ]
    assert tau_measure._busy(flights) == 4.0


@pytest.mark.parametrize(
    ("words", "rest", "said"),
    [
        ("--tau auto --seed 1", "--seed 1", "auto"),
        ("--tau=auto:2-9 --seed 1", "--seed 1", "auto:2-9"),
        ("--tau 3 --seed 1", "--tau 3 --seed 1", ""),
        ("--tau auto --tau 3", "--tau auto --tau 3", ""),
        ("--tau 3 --seed 1 --tau auto", "--seed 1", "auto"),
    ],
)
def test_the_last_tau_counts(words: str, rest: str, said: str) -> None:
    assert spec.take_tau_auto(words.split()) == (rest.split(), said)


@pytest.mark.parametrize(
    "text", ["auto:", "auto:3", "auto:0-4", "auto:5-4", "auto:a-b", "automatic"]
)
def test_bad_bounds(text: str) -> None:
    with pytest.raises(UserError, match="auto:LOW-HIGH"):
        spec.take_tau_auto(["--tau", text])


def test_options_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="add --tau auto"):
        spec.parse(TrainOptions, "train", ["--retune", "5"])
    with pytest.raises(UserError, match="--retune must be at least 0"):
        spec.parse(TrainOptions, "train", ["--retune", "-5", "--tau", "auto"])
    with pytest.raises(UserError, match="give --tau a number"):
        compare.compare(["--algorithm", "all", "--tau", "auto"])


def test_simulated_with_a_known_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--task logistic --agents 3 --c 2.5 --iterations 6 --tau auto --out {tmp_path}/run"
    asked = spec.parse(SimulateOptions, "simulate", words.split())
    out = simulate.run(asked)
    assert "tau = 3 chosen: a message takes 2.5 gradients" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["algorithm"]["tau"] == 3
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["time"] == 6.0 and rows[-1]["exposed"] == 0 and rows[-1]["tau"] == 3
    asked.options.resume, asked.options.iterations = "auto", 9
    simulate.run(asked)
    assert "goes on from round 2, iteration 6, with tau 3" in capsys.readouterr().err


def test_up_at_once_and_down_in_steps() -> None:
    """A burst that a slow network gives after a pause must not make tau swing."""
    retuner = tau_measure.Retuner.__new__(tau_measure.Retuner)
    retuner._too_small = retuner._checks_left = 0
    taus = [9]
    for wanted in [1, 1, 1, 1, 1, 6, 1, 1, 1, *[1] * tau_measure.PATIENCE]:
        taus.append(retuner.next_tau(taus[-1], wanted))
    assert taus[:9] == [9, 6, 4, 2, 1, 1, 6, 4, 2]
    assert taus[9:16] == [2] * 7 and taus[-1] == 1


def test_an_agent_made_slow_is_timed_as_slow() -> None:
    transport = Some(reduce=lambda values: Some(result=lambda: values))
    training: Any = Some(
        workers=[Some(model=nn.Linear(1, 1))], runner=Some(transport=transport),
        backward=lambda worker, k: time.sleep(0.01), drag=Drag(("0:3",), 0.0, 0, 2, 0),
    )  # fmt: skip
    assert tau_measure._gradient_seconds(training) >= 0.03
