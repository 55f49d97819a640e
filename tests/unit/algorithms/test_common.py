"""What every registered algorithm must do, whatever its equations: boundaries, resume, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.runtime.runner import Runner
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm
from support import paper_equations
from support.bits import same

N, D, ALPHA = 5, 7, 0.05
EVERY = [(name, tau) for name in algorithms.names() for tau in paper_equations.taus(name)]


class Run:
    """A runner on quadratics, and what was seen at each round boundary."""

    def __init__(self, name: str, tau: int) -> None:
        self.problem = paper_equations.Quadratics(N, D, noise=0.2)
        self.transport = StackedTransport(topology.from_name("one-peer-ring", N))
        x = torch.from_numpy(self.problem.x0.copy())
        self.runner = Plain(x, algorithms.get(name)(tau=tau), self.transport, ALPHA)
        self.boundaries: list[dict[str, Any]] = []
        self.runner.on_round.append(self._boundary)
        self.runner.start()

    def _boundary(self, runner: Runner) -> None:
        landed = len(self.transport.records)
        self.transport.drain()
        assert len(self.transport.records) == landed, "a message is in flight at a round boundary"
        self.boundaries.append(copied(runner.state_dict()))

    def step(self) -> None:
        g = self.problem.grad(self.runner.x.numpy(), self.runner.t)
        self.runner.advance(torch.from_numpy(g))


def copied(state: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: y.clone() for name, y in state["algorithm"].items()}
    return {**state, "x": state["x"].clone(), "algorithm": tensors}


@pytest.mark.parametrize(("name", "tau"), EVERY)
def test_a_round_is_tau_gradients_and_its_top_is_a_checkpoint(name: str, tau: int) -> None:
    run = Run(name, tau)
    for r in range(4):
        assert len(run.boundaries) == r + 1
        # Up to the first yield only messages have started.
        assert same(run.boundaries[-1], run.runner.state_dict())
        for _ in range(tau):
            run.step()
    assert [b["t"] for b in run.boundaries] == [0, tau, 2 * tau, 3 * tau, 4 * tau]


@pytest.mark.parametrize(("name", "tau"), EVERY)
def test_a_resumed_run_is_the_run_that_never_stopped(name: str, tau: int) -> None:
    whole, resumed = Run(name, tau), Run(name, tau)
    for _ in range(5 * tau):
        whole.step()
    for _ in range(2 * tau + 1):  # into a round that is then dropped
        resumed.step()
    resumed.runner.load_state_dict(copied(whole.boundaries[2]))
    for _ in range(3 * tau):
        resumed.step()
    assert same(whole.runner.state_dict(), resumed.runner.state_dict())


@pytest.mark.parametrize("name", algorithms.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_and_a_single_agent(name: str, dtype: torch.dtype) -> None:
    tau = paper_equations.taus(name)[-1]
    x = torch.linspace(-1, 1, 3, dtype=dtype).reshape(1, 3)
    transport = StackedTransport(topology.from_name("ring", 1))
    runner = Plain(x, algorithms.get(name)(tau=tau), transport, 0.1)
    runner.start()
    for _ in range(6 * tau):
        runner.advance(runner.x.clone())
    assert runner.x.dtype == dtype
    assert all(y.dtype == dtype for y in runner.algorithm.state_dict().values() if y.dim())
    assert float(runner.x.abs().max()) < 0.95
    assert float(runner.x.abs().max()) > 0


class Vector(torch.nn.Module):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(x.clone())


@pytest.mark.parametrize(("name", "tau"), EVERY)
def test_models_with_optimizers_do_the_same(name: str, tau: int) -> None:
    plain, problem = Run(name, tau), paper_equations.Quadratics(N, D, noise=0.2)
    models = [Vector(x) for x in torch.from_numpy(problem.x0)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=ALPHA) for model in models]
    transport = StackedTransport(topology.from_name("one-peer-ring", N))
    swarm = Swarm(models, optimizers, algorithms.get(name)(tau=tau), transport)
    swarm.start()
    for t in range(4 * tau):
        plain.step()
        X = np.array([model.x.detach().numpy() for model in models])
        for model, g in zip(models, torch.from_numpy(problem.grad(X, t)), strict=True):
            model.x.grad = g
        swarm.step()
    X = np.array([model.x.detach().numpy() for model in models])
    np.testing.assert_allclose(X, plain.runner.x.numpy(), rtol=0, atol=1e-12)


BAD = [
    ("oldsgd", {"tau": 0}, "tau must be at least 1"),
    ("oldsgd", {"tau": 2.5}, "tau must be a whole number, not 2.5"),
    ("oldsgd", {"form": "both"}, "form must be"),
    ("dsgd", {"tau": 2}, "use ldsgd"),
    ("kgt", {"eta_s": 0.0}, "eta_s must be positive"),
    ("lugt", {"eta": -1.0}, "eta must be positive"),
    ("olgt", {"eta": float("nan")}, "eta must be positive"),
    ("led", {"beta": -0.1}, "beta must be finite and at least 0"),
    ("oled", {"beta": float("inf")}, "beta must be finite"),
    ("overlap_local_sgd", {"a": 1.5}, "a must be from 0 to 1"),
    ("overlap_local_sgd", {"gamma": 1.0}, "gamma must be at least 0 and below 1"),
    ("co2", {"beta": 1.0}, "beta must be at least 0 and below 1"),
    ("co2", {"outer": 0.0}, "outer must be positive"),
    ("co2", {"Lambda": 0.5}, "Lambda must be finite and at least 1"),
    ("co2", {"clip_m": 0.0}, "clip_m must be positive"),
    ("diloco", {"outer": float("inf")}, "outer must be positive and finite"),
    ("eager_diloco", {"outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1"),
    ("moldsgd", {"outer_momentum": -0.1}, "outer_momentum must be at least 0 and below 1"),
    ("noloco", {"pull": 0.0}, "pull must be positive and finite"),
]


@pytest.mark.parametrize(("name", "options", "says"), BAD)
def test_bad_options_are_one_sentence(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        algorithms.get(name)(**options)
    assert "\n" not in str(error.value)


def test_kgt_says_why_it_cannot_start_at_step_size_zero() -> None:
    x = torch.ones(1, 2)
    transport = StackedTransport(topology.from_name("ring", 1))
    runner = Plain(x, algorithms.get("kgt")(tau=1), transport, 0.0)
    runner.start()
    with pytest.raises(UserError, match="step size"):
        runner.advance(torch.ones(1, 2))


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(UserError, match="did you mean oldsgd"):
        algorithms.get("oldsdg")


def test_a_name_is_registered_once_and_needs_its_dataclass() -> None:
    @dataclasses.dataclass
    class Other(algorithms.Algorithm):
        pass

    with pytest.raises(UserError, match="registered already"):
        algorithms.register("oldsgd")(Other)

    class Plain(algorithms.Algorithm):
        pass

    with pytest.raises(UserError, match="@dataclass"):
        algorithms.register("plain")(Plain)
    assert "plain" not in algorithms.names()


def test_state_that_is_not_there_yet_starts_like_the_model() -> None:
    """A checkpoint made before the first round has no state; the run begins it anew."""
    run = Run("led", 2)
    state = copied(run.boundaries[0])
    state["algorithm"] = {}
    for _ in range(3):
        run.step()
    run.runner.load_state_dict(state)
    assert torch.equal(run.runner.algorithm.state_dict()["y"], torch.zeros(N, D).double())
    np.testing.assert_array_equal(run.runner.x.numpy(), run.problem.x0)
