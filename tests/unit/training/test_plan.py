"""How the command lines take --auto, --plan, --tau auto and --fragments auto."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_oldsgd import simulate, topology
from hpc_oldsgd.algorithms import OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.study import compare
from hpc_oldsgd.training import measure, plan, retune
from hpc_oldsgd.training.options import SimulateOptions, TrainOptions
from hpc_oldsgd.training.plan import Plan, parse_auto
from hpc_oldsgd.transport.base import FlightRecord


def parsed(*words: str) -> spec.Spec[TrainOptions]:
    return spec.parse(TrainOptions, "train", words)


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        parsed(*words)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "rest", "said"),
    [
        ("--tau auto --seed 1", "--seed 1", {"tau": "auto"}),
        ("--tau=auto:2-9 --seed 1", "--seed 1", {"tau": "auto:2-9"}),
        ("--tau 3 --seed 1", "--tau 3 --seed 1", {}),
        ("--tau auto --tau 3", "--tau auto --tau 3", {}),
        ("--tau 3 --seed 1 --tau auto", "--seed 1", {"tau": "auto"}),
        ("--fragments auto", "--fragments 1", {"fragments": "auto"}),
        ("--auto --seed 1", "--auto=any --seed 1", {}),
        ("--auto", "--auto=any", {}),
        ("--auto graph=ring", "--auto graph=ring", {}),
    ],
)
def test_what_is_left_to_choose(words: str, rest: str, said: dict[str, str]) -> None:
    assert spec.take_choice(words.split()) == (rest.split(), said)


def test_auto_leaves_all_and_is_narrowed() -> None:
    assert parsed("--auto").options.choice == parse_auto("any")
    asked = parsed("--auto", "graph=ring|torus,wire=fp32|bf16,tau=2-40,fragments=8")
    assert asked.options.choice == {
        "topology": "ring|torus", "wire": "fp32|bf16", "tau": "auto:2-40", "fragments": "8",
    }  # fmt: skip
    assert asked.algorithm.P == 8
    allowed = plan.Allowed.of(asked.options.choice, asked.algorithm)
    assert allowed == plan.Allowed(("ring", "torus"), ("fp32", "bf16"), plan.Bounds(2, 40), 8)
    assert parse_auto("tau=5")["tau"] == "auto:5-5"
    assert "fragments" not in parsed("--algorithm", "kgt", "--auto").options.choice
    assert list(spec.make_graphs(parsed("--auto").options, 3)) == ["ring", "one-peer-exponential"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--auto wires=int4", "no choice of --auto 'wires'; did you mean wire"),
        ("--auto graph=", "leaves nothing to choose"),
        ("--auto wire=int4|", "leaves nothing to choose"),
        ("--auto wire=int4|int3", "there is no wire type 'int3'; known: same, fp32"),
        ("--auto graph=ring,graph=torus", "--auto says graph twice"),
        ("--auto tau=5-2", "auto:LOW-HIGH"),
        ("--auto fragments=few", "write one number"),
        ("--auto fragments=9,tau=1-4", "tau is at most 4"),
        ("--auto --tau 5", "--auto chooses tau: leave out --tau"),
        ("--auto --tau auto", "--auto chooses tau"),
        ("--auto --topology torus", "--auto chooses topology"),
        ("--auto --plan x", "choose one"),
        ("--algorithm kgt --auto fragments=2", "kgt sends x whole"),
        ("--retune 5", "add --tau auto"),
        ("--retune -5 --tau auto", "--retune must be at least 0"),
        ("--tau auto:3", "auto:LOW-HIGH"),
        ("--tau auto:0-4", "auto:LOW-HIGH"),
        ("--tau automatic", "auto:LOW-HIGH"),
        ("--tau auto:2-6 --fragments 8", "--tau auto:2-6 allows 6"),
        ("--algorithm ldsgd --fragments auto", "--fragments belongs to the algorithm"),
        ("--fragments many", "--fragments"),
    ],
)
def test_one_clear_line(words: str, said: str) -> None:
    assert said in refused(*words.split())


def test_a_plan_is_given_back(tmp_path: Path) -> None:
    made = Plan("torus", "int4", 6, 3, "why", 4, "oldsgd", "10 float32")
    (tmp_path / "config.json").write_text(json.dumps({"plan": made.as_dict()}))
    for path in (tmp_path, tmp_path / "config.json"):
        asked = parsed("--plan", str(path))
        assert asked.plan == made and not asked.options.choice
        told = (asked.options.topology, asked.options.wire, asked.algorithm.tau, asked.algorithm.P)
        assert told == ("torus", "int4", 6, 3)
    assert "--plan chooses tau" in refused("--plan", str(tmp_path), "--tau", "5")
    for fits, said in [((4, "oldsgd", "9 float32"), "model 10 float32 instead of 9"),
                       ((2, "oldsgd", "10 float32"), "ranks 4 instead of 2"),
                       ((4, "kgt", "10 float32"), "algorithm oldsgd instead of kgt")]:  # fmt: skip
        with pytest.raises(UserError, match=said):
            made.check(*fits)
    made.check(4, "oldsgd", "10 float32")
    with pytest.raises(FileNotFoundError):  # the command names the file
        parsed("--plan", str(tmp_path / "none"))
    damaged = [{}, {**made.as_dict(), "tau": 0}, {**made.as_dict(), "tau": "6"}, {"plan": 1}, [],
               {**made.as_dict(), "fragments": 7}, {**made.as_dict(), "wire": ""}]  # fmt: skip
    for content in damaged:
        (tmp_path / "bad.json").write_text(json.dumps(content))
        assert "holds no plan" in refused("--plan", str(tmp_path / "bad.json"))


def test_wires_and_graphs_that_fit() -> None:
    wires = measure.wires_for(plan.WIRES, OLDSGD(), torch.float32)
    assert wires == ["same", "bf16", "int8", "int4"]
    assert measure.wires_for(("int4", "fp32", "same"), OLDSGD(), torch.float32) == ["fp32", "int4"]
    assert "bf16" not in measure.wires_for(plan.WIRES, OLDSGD(), torch.bfloat16)
    assert measure.wires_for(plan.WIRES, OLDSGD(form="gradient"), torch.float32) == ["same"]
    with pytest.raises(UserError, match="no wire type"):
        measure.wires_for(("int3",), OLDSGD(), torch.float32)
    with pytest.raises(UserError, match="no topology"):
        measure.graphs_for(("mesh",), lambda name: topology.from_name(name, 4))


def test_simulated_with_a_known_c_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--task logistic --agents 3 --c 2.5 --iterations 6 --out {tmp_path}/run"
    asked = spec.parse(SimulateOptions, "s", f"{words} --tau auto --fragments auto".split())
    out = simulate.run(asked)
    said = capsys.readouterr().err
    assert "tau = 3, fragments = 3 chosen: a message takes 2.5 gradients" in said
    known = json.loads((out / "config.json").read_text())
    assert (known["algorithm"]["tau"], known["algorithm"]["fragments"]) == (3, 3)
    assert known["plan"]["tau"] == 3
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["time"] == 6.0 and rows[-1]["exposed"] == 0 and rows[-1]["tau"] == 3
    asked.options.resume, asked.options.iterations = "auto", 9
    simulate.run(asked)
    assert "iteration 6, with tau 3, with fragments 3" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["algorithm"]["fragments"] == 3
    asked = spec.parse(SimulateOptions, "s", f"{words} --tau auto --resume auto".split())
    with pytest.raises(UserError, match="fragments is 1, was auto"):
        simulate.run(asked)


def test_compared_at_given_numbers() -> None:
    with pytest.raises(UserError, match="give --tau a number"):
        compare.compare(["--algorithm", "all", "--tau", "auto"])
    with pytest.raises(UserError, match="give --fragments a number"):
        compare.compare(["--algorithm", "all", "--fragments", "auto"])


def test_flights_under_way_together_count_once() -> None:
    flights = [
        FlightRecord("exchange", 0, posted, completed, 0.0)
        for posted, completed in [(5.0, 6.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.75)]
    ]
    assert retune._busy(flights) == 4.0


def test_up_at_once_and_down_in_steps() -> None:
    """A burst that a slow network gives after a pause must not make tau swing."""
    retuner = retune.Retuner.__new__(retune.Retuner)
    retuner._too_small = retuner._checks_left = 0
    taus = [9]
    for wanted in [1, 1, 1, 1, 1, 6, 1, 1, 1, *[1] * retune.PATIENCE]:
        taus.append(retuner.next_tau(taus[-1], wanted))
    assert taus[:9] == [9, 6, 4, 2, 1, 1, 6, 4, 2]
    assert taus[9:16] == [2] * 7 and taus[-1] == 1


def test_measuring_gradients_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    transport: Any = Some(reduce=lambda values: Some(result=lambda: values))
    took, deviation = measure.gradient_seconds(
        model, lambda k: model(torch.randn(4, 3)).sum().backward(), transport
    )
    assert took > 0 and deviation >= 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("seconds", "taken"), [(0.1, 11), (0.002, 152), (1e-5, 201), (2.0, 3)])
def test_short_gradients_are_measured_more_often(
    seconds: float, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of 2 ms are over in one turn of a core that ranks share. The clock is our own."""
    transport: Any = Some(reduce=lambda values: Some(result=lambda: values))
    asked: list[int] = []
    clock = Some(perf_counter=lambda: len(asked) * seconds)
    monkeypatch.setattr(measure, "time", clock)
    mean, _ = measure.gradient_seconds(nn.Linear(1, 1), asked.append, transport)
    assert abs(len(asked) - taken) <= 1 and mean == pytest.approx(seconds)
    assert {*asked} == {*range(min(len(asked), 1 + measure.GRADIENTS))}


@dataclass
class Link:
    """A transport over a made link: each message takes start + bytes / rate, its burst is free."""

    whole_s: float
    start_s: float = 0.001
    burst: float = 0.0
    """Share of a model that costs nothing."""
    topology: Any = field(default_factory=lambda: Some(period=1))
    records: list[Any] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    now: float = 0.0

    def reduce(self, _values: Any) -> Any:
        return Some(result=lambda: None)

    def everywhere(self, *values: float) -> Any:
        return Some(result=lambda: np.array([values]))

    def exchange(self, x: torch.Tensor, _round: int, share: float) -> Any:
        self.sent.append(len(x))
        took = self.start_s + self.whole_s * max(0.0, share - self.burst)
        self.records.append(Some(transfer=took))
        self.now += took
        return Some(mix_into=lambda _: None)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("whole_s", [0.02, 0.4, 0.6, 3.0, 100.0])
@pytest.mark.parametrize("burst", [0.0, 1e-4])
def test_a_slow_message_is_known_by_its_parts(
    whole_s: float, burst: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3%, also where a switch lets the first bytes pass; and it never costs minutes."""
    link: Any = Link(whole_s, burst=burst)
    monkeypatch.setattr(measure, "time", Some(perf_counter=lambda: link.now))
    x = torch.zeros(10_000)
    seen = measure.message_seconds(link, x)
    assert seen.seconds == pytest.approx(link.start_s + whole_s * (1 - burst), rel=0.03)
    if burst == 0.0:
        assert seen.more == pytest.approx(link.start_s, rel=0.03)
    whole_is_quick = (1 + measure.EXCHANGES) * whole_s < measure.SLOW_S
    assert (max(link.sent) == len(x)) == whole_is_quick and link.closed
    assert link.now < 1.3 * max(measure.SLOW_S, (1 + measure.EXCHANGES) * whole_s / 64)


@pytest.mark.parametrize("d", [1, 7, 8, 9, 511, 513])
def test_a_tiny_model_is_measured_too(d: int) -> None:
    link: Any = Link(0.1)
    assert measure.message_seconds(link, torch.zeros(d)).seconds == pytest.approx(0.101)
    assert max(link.sent) == d and min(link.sent) >= 1
