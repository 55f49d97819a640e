"""The runner: counts, round boundaries, stopping, resuming, one algorithm object for many runs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import LDSGD, OLDSGD, Algorithm
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.simulation.clock import Clock
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm
from support.small_problems import OPTIMIZERS, backward, cnn, rows


def plain(algorithm: Algorithm, n: int = 3) -> Plain:
    transport = StackedTransport(topology.from_name("ring", n))
    return Plain(rows(n, 4), algorithm, transport, 0.1)


def swarm(algorithm: Algorithm, optimizer: str = "momentum", n: int = 3, seed: int = 0) -> Swarm:
    models = [cnn(seed=seed) for _ in range(n)]
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in models]
    clock = Clock(n, 2.0, jitter=0.3, seed=4)
    transport = StackedTransport(topology.from_name("one-peer-ring", n), clock)
    return Swarm(models, optimizers, algorithm, transport)


def train(runner: Swarm, until: int) -> None:
    while runner.t < until:
        for i, model in enumerate(runner.models):
            model.zero_grad()
            backward(model, i, runner.t)
        runner.step()


def test_steps_and_rounds_are_counted():
    runner = plain(OLDSGD(tau=3))
    seen = []
    runner.on_round.append(lambda r: seen.append((r.t, r.r)))
    runner.start()
    for _ in range(7):
        assert runner.advance(torch.zeros(3, 4))
    assert (runner.t, runner.r) == (7, 2)
    assert seen == [(0, 0), (3, 1), (6, 2)]


def test_stop_ends_at_the_boundary_and_finish_is_safe_twice():
    runner = plain(LDSGD(tau=2))
    runner.on_round.append(lambda r: r.stop() if r.r == 1 else None)
    runner.start()
    assert runner.advance(torch.zeros(3, 4))
    assert not runner.advance(torch.zeros(3, 4))
    x = runner.x.clone()
    assert not runner.advance(torch.ones(3, 4))
    assert torch.equal(runner.x, x) and (runner.t, runner.r) == (2, 1)
    runner.finish()
    runner.finish()


def test_after_a_step_that_failed_the_next_one_says_so():
    """A loop that catches the error, as for want of memory, must not go on without training."""
    runner = plain(OLDSGD(tau=2))
    runner.start()
    runner.descend = lambda g: torch.zeros(1) @ torch.zeros(2)  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        runner.advance(torch.zeros(3, 4))
    del runner.descend
    with pytest.raises(UserError, match="an earlier step failed in the middle of a round"):
        runner.advance(torch.zeros(3, 4))
    runner.finish()
    assert not runner.advance(torch.zeros(3, 4))


def test_finish_in_the_middle_of_a_round_completes_the_flight():
    runner = plain(OLDSGD(tau=5))
    runner.start()
    runner.advance(torch.zeros(3, 4))
    assert not runner.transport.records
    runner.finish()
    assert [record.kind for record in runner.transport.records] == ["exchange"]


def test_a_runner_owns_its_algorithms_state():
    shared = OLDSGD(tau=2, form="gradient")
    first, second = plain(shared), plain(shared)
    for runner in (first, second):
        runner.start()
        runner.advance(torch.ones(3, 4))
    assert not hasattr(shared, "acc")
    assert first.algorithm.acc is not second.algorithm.acc


@pytest.mark.parametrize("name", algorithms.names())
def test_a_resumed_swarm_is_the_one_that_never_stopped(name):
    cls = algorithms.get(name)
    algorithm = cls() if cls().tau == 1 else cls(tau=3)
    tau, saved = algorithm.tau, {}

    def save(runner: Swarm) -> None:
        if runner.r == 2:
            saved.update(copy.deepcopy(runner.state_dict()))

    whole = swarm(algorithm)
    whole.on_round.append(save)
    whole.start()
    train(whole, 5 * tau)
    resumed = swarm(algorithm, seed=8)
    for ours, theirs in zip(resumed.models, whole.models, strict=True):
        ours[8].load_state_dict(theirs[8].state_dict())  # frozen: no part of the state
    resumed.start()
    resumed.load_state_dict(saved)
    assert (resumed.t, resumed.r) == (2 * tau, 2)
    train(resumed, 5 * tau)
    assert torch.equal(whole.x, resumed.x)
    assert whole.transport.clock.t.tolist() == resumed.transport.clock.t.tolist()


def test_a_checkpoint_inside_a_round_is_refused():
    runner = plain(OLDSGD(tau=2, form="gradient"))
    runner.start()
    runner.state_dict()
    runner.advance(torch.zeros(3, 4))
    with pytest.raises(UserError, match=r"between two rounds .*since the last one: 1"):
        runner.state_dict()


def test_gradient_form_refuses_what_it_would_get_wrong():
    with pytest.raises(UserError, match='form="delta"'):
        swarm(OLDSGD(form="gradient"), "adamw")
    with pytest.raises(UserError, match='buffers="local"'):
        swarm(OLDSGD(form="gradient"), "sgd")
    models = [torch.nn.Linear(2, 1) for _ in range(3)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    transport = StackedTransport(topology.from_name("ring", 3))
    runner = Swarm(models, optimizers, OLDSGD(tau=2, form="gradient"), transport)
    runner.start()
    for model in models:
        model(torch.ones(2)).backward()
    runner.step()
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.2  # as a scheduler does in the middle of a round
    with pytest.raises(UserError, match="step size changed inside a round"):
        runner.step()


def test_too_few_models_are_refused():
    transport = StackedTransport(topology.from_name("ring", 3))
    model = cnn()
    with pytest.raises(UserError, match="3 agents need as many"):
        Swarm([model], [torch.optim.SGD(model.parameters(), lr=0.1)], OLDSGD(), transport)


def test_an_algorithm_may_read_and_change_the_gradient():
    @dataclass
    class Signed(Algorithm):
        """g, scaled, and what the optimizer makes of it: the runner hands on what it is given."""

        def schedule(self, agent):
            for _ in agent.rounds():
                g = yield
                agent.descend(2 * g)

    runner = swarm(Signed(), "sgd", n=2)
    runner.start()
    before = runner.x.clone()
    for i, model in enumerate(runner.models):
        backward(model, i, 0)
    g = torch.stack([flat.gradient().clone() for flat in runner.flats])
    runner.step()
    for flat, x, b, own in zip(runner.flats, runner.x, before, g, strict=True):
        for slot in flat.parameters:
            k = slice(slot.offset, slot.offset + slot.tensor.numel())
            torch.testing.assert_close(x[k], b[k] - 0.05 * 2 * own[k])
