"""fp32 norms in a model of another type: mixed as if they were in x."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hpc_oldsgd import OLDSGD, Agent, UserError, algorithms
from hpc_oldsgd.algorithms import XOLDSGD, Algorithm


class Norms(nn.Module):
    """`wide` has the type of the body in the reference, fp32 norms and statistics otherwise.

    The body's own gradient does not depend on the norms, nor theirs on it: so the type of the one
    changes no bit of the other.
    """

    def __init__(self, body: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 3, dtype=body)
        self.norm = nn.BatchNorm1d(4)

    def backward(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(6, 5, generator=g), torch.randn(6, 4, generator=g)
        self.body(x.to(self.body.weight.dtype)).square().sum().backward()
        (self.norm(y) * y).square().mean().backward()


def train(
    comm: Any,
    body: torch.dtype,
    resume: bool = False,
    fragments: int = 1,
    algorithm: Algorithm | None = None,
) -> tuple[Agent, Norms, dict]:
    model = Norms(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    algorithm = algorithm or OLDSGD(tau=3, fragments=fragments)
    with Agent(model, optimizer, algorithm, "ring", comm) as agent:
        agent.metrics()
        saved: dict[str, Any] = {}
        for k in range(12):
            optimizer.zero_grad()
            model.backward(100 * comm.rank + k)
            agent.step()
            if k == 5:
                saved = copy.deepcopy(agent.state_dict())
        mean = agent.mean_state_dict()
        if "oldsgd" in algorithm.name:
            assert (agent.metrics()["consensus"] > 0) == (comm.size > 1)
        if resume:
            agent.load_state_dict(saved)
            for k in range(6, 12):
                optimizer.zero_grad()
                model.backward(100 * comm.rank + k)
                agent.step()
    return agent, model, mean


@pytest.mark.parametrize("body", [torch.bfloat16, torch.float64])
def test_norms_of_another_type_are_mixed_as_in_x(comm, body):
    """Their bits are those of a model that is fp32 as a whole."""
    agent, model, mean = train(comm, body)
    assert agent.x.dtype == body and len(agent.others.flats) == 1
    _, reference, _ = train(comm, torch.float32)
    assert torch.equal(model.norm.weight, reference.norm.weight)
    assert torch.equal(model.norm.bias, reference.norm.bias)
    assert torch.equal(model.norm.running_var, reference.norm.running_var)
    everybody = torch.tensor(comm.allgather(model.norm.weight.tolist()))
    torch.testing.assert_close(mean["norm.weight"], everybody.mean(0))
    if comm.size > 1:
        assert not torch.equal(everybody[0], everybody[1])


def test_a_resumed_run_with_two_types_is_the_run_that_never_stopped(comm):
    _, whole, _ = train(comm, torch.bfloat16)
    _, resumed, _ = train(comm, torch.bfloat16, resume=True)
    for (key, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_two_types_while_x_travels_in_fragments(comm):
    """The norms travel whole, as they do without fragments; a resumed run is the same run."""
    agent, model, mean = train(comm, torch.bfloat16, fragments=3)
    _, whole, _ = train(comm, torch.bfloat16)
    assert torch.equal(model.norm.weight, whole.norm.weight)
    assert torch.equal(model.norm.running_var, whole.norm.running_var)
    bodies = torch.stack([torch.tensor(b) for b in comm.allgather(model.body.weight.tolist())])
    torch.testing.assert_close(mean["body.weight"].float(), bodies.mean(0), rtol=0.01, atol=0.01)
    _, resumed, _ = train(comm, torch.bfloat16, resume=True, fragments=3)
    assert all(map(torch.equal, model.state_dict().values(), resumed.state_dict().values()))
    assert agent.t == 12


READ = [name for name in algorithms.names() if algorithms.get(name).reads_gradient]
"""These need the gradient as one vector."""


@pytest.mark.max_ranks(3)
@pytest.mark.parametrize("name", sorted(set(algorithms.names()) - set(READ)))
def test_two_types_under_every_algorithm_that_leaves_the_gradient_alone(comm, name):
    """The algorithm's own state is of two types too, is saved and is resumed."""
    algorithm = algorithms.get(name)
    options = {} if algorithm().tau == 1 else {"tau": 3}
    _, mixed, _ = train(comm, torch.bfloat16, algorithm=algorithm(**options))
    _, reference, _ = train(comm, torch.float32, algorithm=algorithm(**options))
    for key in ("weight", "bias", "running_mean"):
        a, b = getattr(mixed.norm, key), getattr(reference.norm, key)
        # On three ranks a sum over all begins at another one, by the place in x.
        assert torch.equal(a, b) if comm.size < 3 else torch.allclose(a, b, rtol=1e-5)
    _, resumed, _ = train(comm, torch.bfloat16, resume=True, algorithm=algorithm(**options))
    assert all(map(torch.equal, mixed.state_dict().values(), resumed.state_dict().values()))


@pytest.mark.parametrize("name", [*READ, "the paper's form"])
def test_an_algorithm_that_reads_the_gradient_refuses_two_types_in_one_line(comm, name):
    algorithm = OLDSGD(form="gradient") if name == "the paper's form" else algorithms.get(name)()
    model = Norms(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    message = r"^norm\.weight is .*32, body\.weight is .*16: this algorithm needs the gradient as"
    with pytest.raises(UserError, match=message) as caught:
        Agent(model, optimizer, algorithm, "ring", comm)
    assert "\n" not in str(caught.value) and "OLDSGD in its delta form" in str(caught.value)


def test_unfreezing_keeps_the_state_of_both_types(comm):
    model = Norms(torch.bfloat16)
    model.body.bias.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    parameters = [model.body.weight, model.norm.weight]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    with Agent(model, optimizer, XOLDSGD(tau=2), "ring", comm) as agent:
        for k in range(4):
            optimizer.zero_grad()
            model.backward(100 * comm.rank + k)
            agent.step()
        algorithms = (agent.algorithm, agent.others.each[0].algorithm)
        before = [a.y.sort().values for a in algorithms]
        assert comm.size == 1 or all(y.any() for y in before)
        model.requires_grad_(True)
        optimizer.add_param_group({"params": [model.body.bias, model.norm.bias]})
        agent.rebuild()
        algorithms = (agent.algorithm, agent.others.each[0].algorithm)
        for y, old in zip((a.y for a in algorithms), before, strict=True):
            assert y[y != 0].sort().values.equal(old[old != 0])
        optimizer.zero_grad()
        model.backward(1)
        agent.step()


def test_evaluation_with_two_types_leaves_no_trace(comm):
    model = Norms(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        for k in range(3):
            optimizer.zero_grad()
            model.backward(100 * comm.rank + k)
            agent.step()
        own = copy.deepcopy(model.state_dict())
        state = agent.mean_state_dict()
        with agent.mean_weights():
            assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
