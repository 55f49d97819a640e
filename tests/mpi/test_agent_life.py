"""The drop-in from its start to its end: what is checked, saved, resumed, stopped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import LDSGD, OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.agent import Agent
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm
from support.small_problems import batch, cnn
from support.training_loops import STEPS, Loop


def test_all_start_from_rank_zeros_model(comm):
    for sync in (True, False):
        model = cnn(seed=10 + comm.rank)
        with Agent(model, Loop().make(model)[0], LDSGD(tau=5), "ring", comm, sync=sync):
            first = cnn(seed=10 if sync else 10 + comm.rank)
            for own, wanted in zip(model.parameters(), first.parameters(), strict=True):
                assert torch.equal(own, wanted)  # the frozen ones, too


def other_layer(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3))


def other_shape(model: nn.Module) -> None:
    model[4] = nn.Linear(5 * 6 * 6, 8)


def other_frozen(model: nn.Module) -> None:
    model[8] = nn.Linear(7, 9).requires_grad_(False)


def unfrozen(model: nn.Module) -> None:
    model[8].requires_grad_(True)


def last_frozen(model: nn.Module) -> None:
    model[10].requires_grad_(False)


def channels_last(model: nn.Module) -> None:
    model[0] = nn.Conv2d(2, 5, 3)  # with one channel both layouts are the same
    model.to(memory_format=torch.channels_last)


def no_gradient(model: nn.Module) -> None:
    model.requires_grad_(False)


def half(model: nn.Module) -> None:
    model[4].to(torch.bfloat16)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "change, named",
    [
        (other_layer, r"rank 1 has another .* 11\.weight\[3x3\]"),
        (other_shape, r"rank 1 has another .* 4\.weight\[8x180\]:float32 instead of 4\.weight\[7x"),
        (other_frozen, r"rank 1 has another .* 8\.weight\[9x7\]"),
        (unfrozen, r"rank 1 has another .* 8\.weight\[7x7\]"),
        (last_frozen, r"rank 1 has another .* 1\.running_mean\[5\]:float32 instead of 10\.weight"),
        (channels_last, r"rank 1 has another .* 0\.weight\[5x2x3x3\]:float32:strides_"),
        (no_gradient, r"rank 1: the model has no parameters that require a gradient"),
        (half, r"rank 1 has another .* instead of 4\.weight\[7x180\]:float32"),
    ],
)
def test_another_model_on_one_rank_is_found_and_named(comm, change, named):
    model = cnn()
    if comm.rank == 1:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=named):
        Agent(model, optimizer, OLDSGD(), "ring", comm)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    "odd, named",
    [
        ({"topology": "star"}, r"star:\w+ instead of .*,ring:"),
        ({"sync": False}, "sync=False,.* instead of .*,sync=True"),
        ({"buffers": "local"}, r":not_mixed instead of 1\.running_mean"),
        ({"wire": "bf16"}, "bfloat16,.* instead of"),
        ({"all_reduce": "mpi"}, "all_reduce=mpi,.* instead of .*all_reduce=ring"),
    ],
)
def test_another_setting_on_one_rank_is_found_and_named(comm, odd, named):
    model = cnn()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = {"topology": "ring", **(odd if comm.rank == 1 else {})}
    with pytest.raises(UserError, match=f"rank 1 has another .*{named}"):
        Agent(model, optimizer, OLDSGD(), comm=comm, **settings)


@pytest.mark.mpi(min_size=2)
def test_another_algorithm_on_one_rank_is_found_and_named(comm):
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"rank 1 has another .*tau=6.* instead of .*tau=5"):
        Agent(model, optimizer, OLDSGD(tau=5 + (comm.rank == 1)), "ring", comm)


@pytest.mark.max_ranks(3)
@pytest.mark.parametrize("name", algorithms.names())
def test_a_resumed_run_is_the_run_that_never_stopped(comm, name):
    cls = algorithms.get(name)
    algorithm = cls() if cls().tau == 1 else cls(tau=3)
    rounds, tau = 5, algorithm.tau
    loop = Loop("sgd" if getattr(algorithm, "form", "") == "gradient" else "momentum")
    saved: dict[str, Any] = {}

    def run(seed: int, resume: bool) -> Agent:
        model = cnn(seed=seed)
        optimizer, _ = loop.make(model)
        with Agent(model, optimizer, algorithm, "one-peer-ring", comm) as agent:
            if resume:
                model.load_state_dict(saved["buffers"], strict=False)
                agent.load_state_dict(saved)
            else:

                def save(agent: Any) -> None:
                    if agent.r == 2:
                        saved.update(copy.deepcopy(agent.state_dict()))
                        frozen = {k: v for k, v in model.state_dict().items() if k[0] in "18"}
                        saved["buffers"] = copy.deepcopy(frozen)

                agent.on_round.append(save)
            while agent.t < rounds * tau:
                loop.backward(model, optimizer, comm.rank, agent.t)
                agent.step()
        return agent

    whole, resumed = run(0, False), run(1, True)
    assert (whole.t, whole.r) == (resumed.t, resumed.r) == (rounds * tau, rounds)
    assert torch.equal(whole.x, resumed.x)


def test_a_checkpoint_inside_a_round_is_refused(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        agent.state_dict()
        Loop().backward(model, optimizer, comm.rank, 0)
        agent.step()
        with pytest.raises(UserError, match="between two rounds"):
            agent.state_dict()
        Loop().backward(model, optimizer, comm.rank, 1)
        agent.step()
        agent.state_dict()


@pytest.mark.parametrize("through", ["no_grad", "data"])
def test_weights_changed_at_a_round_boundary_are_what_is_sent(comm, through):
    """The mix has written the next snapshot already; a hook that changes weights undoes that."""
    n, own = comm.size, comm.rank

    def shrink(runner: Any, model: nn.Module, i: int) -> None:
        weight = model[4].weight
        if runner.r:
            with torch.no_grad():  # p.data changes without a trace
                (weight.data if through == "data" else weight).mul_(0.5 + 0.1 * i)

    models = [cnn() for _ in range(n)]
    optimizers = [Loop().make(m)[0] for m in models]
    transport = StackedTransport(topology.from_name("ring", n))
    swarm = Swarm(models, optimizers, OLDSGD(tau=2), transport)
    swarm.on_round.append(lambda s: [shrink(s, m, i) for i, m in enumerate(models)])
    swarm.start()
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        agent.on_round.append(lambda a: shrink(a, model, own))
        for k in range(STEPS):
            for i, m in enumerate(models):
                Loop().backward(m, optimizers[i], i, k)
            swarm.step()
            Loop().backward(model, optimizer, own, k)
            agent.step()
            assert torch.equal(agent.x, swarm.x[own]), f"step {k}"


def test_stop_ends_the_run_at_a_round_boundary(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    steps = 0
    with Agent(model, optimizer, OLDSGD(tau=3), "ring", comm) as agent:
        agent.on_round.append(lambda a: a.stop() if a.r == 2 else None)
        for k in range(100):
            Loop().backward(model, optimizer, comm.rank, k)
            if not agent.step():
                break
            steps += 1
    assert (steps, agent.t, agent.r, agent.finished) == (5, 6, 2, True)


def test_a_scaled_loss_that_overflows_costs_one_gradient(comm):
    """By hand, without as_optimizer(): one rank leaves out a gradient, nobody a step."""

    def run(scale: bool) -> torch.Tensor:
        model = cnn()
        optimizer, _ = Loop("adamw").make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scale)
        with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
            for k in range(6):
                optimizer.zero_grad()
                x, y = batch(comm.rank, k)
                loss = nn.functional.cross_entropy(model(x), y)
                overflows = k == 3 and comm.rank == 0
                scaler.scale(loss * torch.inf if overflows and scale else loss).backward()
                scaler.unscale_(optimizer)
                finite = nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
                if not finite or overflows:
                    optimizer.zero_grad()
                assert bool(finite) == (not (scale and overflows))
                assert agent.step()
                scaler.update()
            return agent.mean()

    torch.testing.assert_close(run(scale=True), run(scale=False))


def test_the_mean_is_taken_before_the_end(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        agent.mean()
    with pytest.raises(UserError, match=r"take mean\(\) before finish\(\)"):
        agent.mean()


def test_a_layer_unfrozen_later_is_named(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    agent = Agent(model, optimizer, OLDSGD(tau=1), "ring", comm)
    model[8].requires_grad_(True)
    Loop().backward(model, optimizer, comm.rank, 0)
    with pytest.raises(UserError, match=r"8\.weight is trained but not mixed"):
        agent.step()
    agent.finish()
