"""--fragments auto: what it chooses where times are known, and how the command lines take it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_oldsgd import simulate, topology
from hpc_oldsgd.algorithms import OLDSGD, XOLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.study import compare
from hpc_oldsgd.training import fragments_auto
from hpc_oldsgd.training.fragments_auto import Cost
from hpc_oldsgd.training.options import SimulateOptions

RING = topology.from_name("ring", 4)


def chosen(cost: Cost, tau: int = 5, **more: float) -> int:
    return fragments_auto.choose(OLDSGD(tau=tau), RING, cost, **more).P  # type: ignore[arg-type]


def test_as_many_as_there_are_steps_where_all_is_even() -> None:
    for c in (0.0, 1.0, 5.0, 12.0):
        for tau in (1, 3, 5):
            assert chosen(Cost(c, c), tau) == tau


def test_fewer_where_gradients_differ() -> None:
    """The same draws for every P; a flight under more steps has more slack."""
    found = [chosen(Cost(3.35, 3.35), jitter=jitter) for jitter in (0.02, 0.1, 0.3, 3.0)]
    assert found[0] == 5 and found == sorted(found, reverse=True) and found[-1] < 5


def test_fewer_where_a_message_has_a_cost_of_its_own() -> None:
    assert chosen(Cost(4.0, 5.0, most=5)) == 5  # 4 + (P - 1) / 4, and tau = 5
    assert chosen(Cost(3.0, 7.0, most=5)) == 2  # 3 + (P - 1)
    assert chosen(Cost(4.0, 20.0, most=5)) == 1
    assert chosen(Cost(1.0, 1.0, most=5, stall=0.05)) == 5
    assert chosen(Cost(1.0, 1.0, most=5, stall=0.2)) == 2


def test_never_more_than_is_stable() -> None:
    graph, algorithm = topology.from_name("torus:4x4", 16), XOLDSGD(tau=8, gamma=0.9)
    most = fragments_auto.choose(algorithm, graph, Cost(1.0, 1.0)).P
    XOLDSGD(tau=8, gamma=0.9, fragments=most).check(graph)
    assert 1 < most < 8


def test_one_agent() -> None:
    made = fragments_auto.choose(OLDSGD(), topology.from_name("ring", 1), Cost(1.0, 1.0))
    assert made.P == 1 and "one agent" in made.reason


def test_simulated_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--task logistic --agents 3 --c 2.5 --iterations 6 --out {tmp_path}/run"
    asked = spec.parse(SimulateOptions, "s", f"{words} --tau auto --fragments auto".split())
    out = simulate.run(asked)
    said = capsys.readouterr().err
    assert "tau = 3 chosen" in said and "fragments = 3 chosen" in said
    known = json.loads((out / "config.json").read_text())["algorithm"]
    assert (known["tau"], known["fragments"]) == (3, 3)
    asked.options.resume, asked.options.iterations = "auto", 9
    simulate.run(asked)
    assert "iteration 6, with tau 3, with fragments 3" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["algorithm"]["fragments"] == 3
    asked = spec.parse(SimulateOptions, "s", f"{words} --tau auto --resume auto".split())
    with pytest.raises(UserError, match="fragments is 1, was auto"):
        simulate.run(asked)


def test_fragments_beyond_the_default_tau() -> None:
    asked = spec.parse(SimulateOptions, "s", ["--tau", "auto", "--fragments", "8"])
    assert asked.options.auto_tau == "auto" and asked.algorithm.P == 8
    with pytest.raises(UserError, match="--tau auto:2-6 allows 6"):
        spec.parse(SimulateOptions, "s", ["--tau", "auto:2-6", "--fragments", "8"])


def test_options_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="--fragments belongs to the algorithm"):
        spec.parse(SimulateOptions, "s", ["--algorithm", "ldsgd", "--fragments", "auto"])
    with pytest.raises(UserError, match="--fragments"):
        spec.parse(SimulateOptions, "s", ["--fragments", "many"])
    with pytest.raises(UserError, match="give --fragments a number"):
        compare.compare(["--algorithm", "all", "--fragments", "auto"])
