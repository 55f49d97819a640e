"""What frameworks and evaluation ask of an Agent."""

from __future__ import annotations

import copy
import itertools
import pydoc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_oldsgd import OLDSGD, Agent, UserError
from hpc_oldsgd.algorithms import KGT, LDSGD, LSGD
from support.small_problems import batch, cnn
from support.training_loops import LOOPS, STEPS, Loop, agent_loop


def lengths(comm: Any) -> list[int]:
    return [5 + 4 * j for j in range(comm.size)]


class Sized:
    """A loader of rank j's own length; `iter` alone, as an IterableDataset, does not know it."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter([batch(self.rank, k) for k in range(self.length)])


def run(comm: Any, algorithm: Any, until: str, sized: bool) -> tuple[Agent, int]:
    model = cnn()
    optimizer, _ = Loop("momentum").make(model)
    taken = 0
    with Agent(model, optimizer, algorithm, "ring", comm) as agent:
        for _ in range(2):  # epochs
            loader: Any = Sized(comm.rank, lengths(comm)[comm.rank])
            for x, y in agent.batches(loader if sized else iter(loader), until):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                agent.step()
                taken += 1
            assert len({*comm.allgather(agent.t)}) == 1  # all ranks stand at the same step
        assert all(torch.equal(a, b) for a, b in zip(agent.mean(), agent.mean(), strict=False))
    return agent, taken


def test_uneven_data_with_lengths_stop_at_the_shortest(comm):
    agent, taken = run(comm, OLDSGD(tau=3), "shortest", sized=True)
    assert taken == agent.t == 2 * min(lengths(comm))


@pytest.mark.parametrize("algorithm", [OLDSGD(tau=3), LDSGD(tau=2), KGT(tau=2)], ids=str)
def test_uneven_data_without_lengths_stop_soon_after_the_shortest(comm, algorithm):
    agent, taken = run(comm, algorithm, "shortest", sized=False)
    shortest = min(lengths(comm))
    assert 2 * shortest <= agent.t <= 2 * (shortest + 3 * algorithm.tau)
    assert taken == 2 * min(lengths(comm)[comm.rank], agent.t // 2)
    assert agent.t % algorithm.tau == 0


@pytest.mark.parametrize("sized", [True, False])
def test_uneven_data_to_the_longest_use_every_batch(comm, sized):
    agent, taken = run(comm, OLDSGD(tau=3), "longest", sized)
    assert taken == 2 * lengths(comm)[comm.rank]
    longest = max(lengths(comm))
    assert 2 * longest <= agent.t <= 2 * (longest + 3 * 3)


def test_an_unknown_end_is_named(comm):
    model = cnn()
    agent = Agent(model, Loop().make(model)[0], OLDSGD(), "ring", comm)
    with pytest.raises(UserError, match='"shortest" or "longest"'):
        next(agent.batches([1, 2], "middle"))  # type: ignore[arg-type]
    agent.finish()


@pytest.mark.parametrize("loop", LOOPS.values(), ids=list(LOOPS))
def test_as_optimizer_trains_as_the_agent_does(comm, loop):
    """A scheduler made with it, and a closure, as frameworks use them; equal in every bit."""
    expected, _, _ = agent_loop(comm, loop, OLDSGD(tau=3), "ring")
    model = cnn(seed=comm.rank)
    inner, _ = loop.make(model)
    with Agent(model, inner, OLDSGD(tau=3), "ring", comm, sync=True) as agent:
        optimizer = agent.as_optimizer()
        assert isinstance(optimizer, torch.optim.Optimizer) and optimizer is agent.as_optimizer()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        for k in range(STEPS):

            def closure(k: int = k) -> float:
                loop.backward(model, optimizer, comm.rank, k)
                return 3.0

            assert optimizer.step(closure) == 3.0
            if loop.scheduler:
                scheduler.step()
            assert torch.equal(agent.x, expected[k]), k
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state


def test_a_grad_scaler_keeps_the_ranks_together(comm):
    """Rank 0's gradient overflows at step 3: it takes the step without a gradient."""

    def train(scaled: bool, unscale: bool = False) -> torch.Tensor:
        model = cnn()
        inner, _ = Loop("adamw").make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        with Agent(model, inner, OLDSGD(tau=2), "ring", comm) as agent:
            optimizer = agent.as_optimizer()
            for k in range(6):
                optimizer.zero_grad()
                x, y = batch(comm.rank, k)
                loss = nn.functional.cross_entropy(model(x), y)
                overflows = k == 3 and comm.rank == 0
                scaler.scale(loss * torch.inf if overflows and scaled else loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                if overflows and not scaled:
                    optimizer.zero_grad()
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                assert (scaler.get_scale() < before) == (scaled and overflows)
            assert agent.t == 6
            return agent.mean()

    plain = train(False)
    assert torch.equal(train(True), plain) and torch.equal(train(True, unscale=True), plain)


def test_a_framework_that_has_joined_the_ranks_itself_is_refused(comm, monkeypatch):
    """Accelerate does, if MASTER_ADDR is set: it would wrap the model in DDP."""
    model = cnn()
    with Agent(model, Loop().make(model)[0], OLDSGD(tau=2), "ring", comm) as agent:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(UserError, match="runs with 2 processes"):
            agent.as_optimizer()
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        agent.as_optimizer()


def test_as_optimizers_state_is_the_agents(comm):
    model = cnn()
    inner, _ = Loop("momentum").make(model)
    with Agent(model, inner, KGT(tau=2), "ring", comm) as agent:
        optimizer = agent.as_optimizer()

        def steps(first: int, last: int) -> torch.Tensor:
            for k in range(first, last):
                Loop().backward(model, optimizer, comm.rank, k)
                optimizer.step()
            return agent.x.clone()

        steps(0, 4)
        state = copy.deepcopy(optimizer.state_dict())
        assert {"state", "param_groups", "agent"} == set(state)
        expected = steps(4, 8)
        steps(8, 9)
        with pytest.raises(UserError, match="between two rounds"):
            optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert agent.t == 4 and torch.equal(steps(4, 8), expected)


@pytest.mark.parametrize("buffers", ["mix", "local"])
@pytest.mark.parametrize("algorithm", [OLDSGD(tau=2), LSGD(tau=3)], ids=str)
def test_the_mean_model_is_the_mean_and_leaves_no_trace(comm, algorithm, buffers):
    def train(look: bool) -> torch.Tensor:
        model = cnn()
        optimizer, _ = Loop("momentum").make(model)
        with Agent(model, optimizer, algorithm, "ring", comm, buffers=buffers) as agent:
            for k in range(7):
                Loop().backward(model, optimizer, comm.rank, k)
                agent.step()
                if not look:
                    continue
                own = {k: v.double().numpy() for k, v in model.state_dict().items()}
                everybody = comm.allgather(own)
                state = agent.mean_state_dict()
                with agent.mean_weights():
                    for name, value in model.state_dict().items():
                        mean = np.mean([each[name] for each in everybody], axis=0)
                        np.testing.assert_allclose(value.double().numpy(), mean, 1e-4, 1e-6, name)
                        assert torch.equal(state[name], value)
                    with pytest.raises(UserError, match=r"inside mean_weights\(\)"):
                        agent.step()
                assert all(np.array_equal(model.state_dict()[k], v) for k, v in own.items())
        return agent.x.clone()

    assert torch.equal(train(True), train(False))


def test_mean_weights_do_not_count_as_changed_weights(comm):
    """The paper's form refuses weights that somebody else changes inside a round."""
    model = cnn(batchnorm=False)
    optimizer, _ = Loop().make(model)
    form = OLDSGD(tau=3, form="gradient")
    with Agent(model, optimizer, form, "ring", comm) as agent:
        for k in range(4):
            Loop().backward(model, optimizer, comm.rank, k)
            agent.step()
            with agent.mean_weights():
                pass


def test_metrics_tell_of_the_rounds_since_the_last_call(comm):
    model = cnn(seed=comm.rank)
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm, sync=False) as agent:
        assert not agent.transport.measure_distance  # nobody asked yet
        assert agent.metrics() == {"step": 0, "round": 0}
        for k in range(4):
            Loop().backward(model, optimizer, comm.rank, k)
            agent.step()
            agent.mean()  # to look at: no part of what is measured
        assert [flight.kind for flight in agent.transport.records] == ["exchange"] * 2
        found = agent.metrics()
        assert (found["step"], found["round"]) == (4, 2)
        assert found["transfer_s"] >= 0 and found["exposed_s"] >= 0 and 0 <= found["hidden"] <= 1
        assert (found["consensus"] > 0) == (comm.size > 1)
        assert all(isinstance(v, (int, float)) for v in found.values())
        assert "transfer_s" not in agent.metrics()


def test_an_agent_says_what_runs(comm):
    model = cnn()
    agent = Agent(model, Loop().make(model)[0], OLDSGD(tau=2), "ring", comm, wire="bf16")
    said = repr(agent)
    for part in (
        f"{comm.rank} of {comm.size}",
        "OLDSGD(tau=2",
        "ring",
        "SGD",
        "bfloat16",
        "step 0",
    ):
        assert part in said
    agent.finish()
    assert "finished" in repr(agent)


def test_help_shows_what_users_call_and_nothing_else():
    text = pydoc.plain(pydoc.render_doc(Agent))
    for name in ("step(self)", "batches(self", "save(self", "mean_weights(self)", "at_boundary"):
        assert name in text
    hidden = ("exchange", "advance", "descend", "local_step", "zeros", "begin_anew", "Runner.")
    for name in (*hidden, "_flatten", "SHOWN", "abc", "transport:"):
        assert name not in text.partition("Methods defined here")[2], name
    for name in itertools.chain(dir(Agent), ("x", "t", "r", "on_round")):
        assert name.startswith("__") or name in text, name


@pytest.mark.max_ranks(1)
def test_a_compiled_step_is_the_same_step(comm):
    """torch.compile around all of it leaves agent.step() out, and compiles the rest."""

    def trained(compiled: bool) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            agent.step()

        with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
            run_step = torch.compile(step, backend="eager") if compiled else step
            for k in range(6):
                run_step(torch.full((2, 5), float(k)))
            return agent.x.clone()

    assert torch.equal(trained(True), trained(False))
