"""What a training loop can do wrong with an Agent: it becomes right, or one clear error."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_oldsgd import OLDSGD, Agent, UserError
from hpc_oldsgd.algorithms import KGT, LDSGD, LSGD, LUGT
from support.small_problems import cnn
from support.training_loops import Loop


class Centred(nn.Module):
    """Its forward makes a new tensor of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center = 0.5 * self.center + x
        return (self.a * self.center).sum()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_a_buffer_that_forward_reassigns_is_mixed(comm):
    """LSGD averages at every step: the buffer of all ranks is the average, x and mean() hold it."""
    model, n = Centred(), comm.size
    optimizer = sgd(model)
    with Agent(model, optimizer, LSGD(tau=1), "ring", comm) as agent:
        expected = 0.0
        for k in range(3):
            optimizer.zero_grad()
            model(torch.full((3,), float(comm.rank + k))).backward()
            agent.step()
            expected = 0.5 * expected + sum(j + k for j in range(n)) / n
            torch.testing.assert_close(model.center, torch.full((3,), expected))
        model(torch.full((3,), 4.0))  # an evaluation changes it, too
        torch.testing.assert_close(
            agent.mean_state_dict()["center"], torch.full((3,), 0.5 * expected + 4.0)
        )
        assert torch.equal(agent.state_dict()["x"], agent.x)
        assert model.center.data_ptr() == agent.flat.slots[1].tensor.data_ptr()


def test_a_buffer_that_changes_its_shape_is_named(comm):
    model = Centred()
    agent = Agent(model, sgd(model), OLDSGD(tau=2), "ring", comm)
    model.center = torch.zeros(4)
    with pytest.raises(UserError, match=r"center .*another shape, type or device"):
        agent.step()
    agent.finish()


def test_a_parameter_of_the_optimizer_that_is_not_in_the_model_is_named(comm):
    model, loss = cnn(), nn.Linear(2, 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*trained, *loss.parameters()], lr=0.1)
    with pytest.raises(UserError, match=r"a tensor \(3, 2\) that is not in the model"):
        Agent(model, optimizer, OLDSGD(), "ring", comm)
    optimizer, _ = Loop().make(model)
    agent = Agent(model, optimizer, OLDSGD(tau=1), "ring", comm)
    optimizer.add_param_group({"params": list(loss.parameters())})
    Loop().backward(model, optimizer, comm.rank, 0)
    with pytest.raises(UserError, match=r"a tensor \(3, 2\) that is not in the model"):
        agent.step()
    agent.finish()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("sync, warned", [(None, True), (True, False), (False, False)])
def test_different_weights_are_noticed_and_it_is_said_what_happens(comm, sync, warned):
    for different in (True, False):
        model = cnn(seed=comm.rank if different else 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Agent(model, Loop().make(model)[0], OLDSGD(), "ring", comm, sync=sync).finish()
        said = [str(w.message) for w in caught if "different weights" in str(w.message)]
        assert len(said) == (warned and different and comm.rank == 0)
        assert all("sync=False" in text and "rank 0" in text for text in said)


class Grows(nn.Module):
    """Its gradient is 1 everywhere; starts frozen in part."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3,), start))
        self.b = nn.Parameter(torch.full((2,), start + 10), requires_grad=False)

    def backward(self) -> None:
        sum(p.sum() for p in self.parameters() if p.requires_grad).backward()  # type: ignore


def test_unfreezing_and_a_new_layer_lose_nothing(comm):
    """`rebuild()`: every rank keeps its weights and counters; a new layer is rank 0's."""
    model = Grows(float(comm.rank))
    optimizer = torch.optim.SGD([model.a], lr=1.0, momentum=0.9)
    with Agent(model, optimizer, LDSGD(tau=2), "ring", comm, sync=False) as agent:
        for k in range(3):
            optimizer.zero_grad()
            model.backward()
            agent.step()
            if k == 0:
                with pytest.raises(UserError, match="between two rounds"):
                    agent.rebuild()
            if k == 1:
                own, momentum = model.a.detach().clone(), optimizer.state[model.a]
                model.b.requires_grad_(True)
                model.c = nn.Parameter(torch.full((4,), 5.0 + comm.rank))
                optimizer.add_param_group({"params": [model.b, model.c]})
                agent.rebuild()
                assert (agent.t, agent.r) == (2, 1)
                assert torch.equal(model.a, own) and optimizer.state[model.a] is momentum
                assert model.b.tolist() == [comm.rank + 10.0] * 2
                assert model.c.tolist() == [5.0] * 4
                assert [slot.name for slot in agent.flat.slots] == ["a", "b", "c"]
        optimizer.zero_grad()
        model.backward()
        agent.step()
        assert agent.r == 2
        mean = agent.mean_state_dict()
    # Momentum of two steps of gradient 1; the mean over ranks is untouched by mixing.
    torch.testing.assert_close(mean["c"], torch.full((4,), 5.0 - 1 - 1.9))
    first = (comm.size - 1) / 2
    torch.testing.assert_close(mean["b"], torch.full((2,), first + 10 - 1 - 1.9))
    torch.testing.assert_close(mean["a"], torch.full((3,), first - 1 - 1.9 - 2.71 - 3.439))


def test_rebuild_keeps_what_an_algorithm_has_gathered(comm):
    """K-GT's correction stays where it was; a rebuild that changes nothing changes no bit."""

    def run(rebuild: bool) -> torch.Tensor:
        model = cnn()
        optimizer, _ = Loop().make(model)
        with Agent(model, optimizer, KGT(tau=2), "ring", comm) as agent:
            for k in range(6):
                Loop().backward(model, optimizer, comm.rank, k)
                agent.step()
                if rebuild and k == 3:
                    agent.rebuild()
        return agent.x.clone()

    assert torch.equal(run(True), run(False))


def test_a_layer_unfrozen_without_rebuild_is_named_with_the_way_out(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    agent = Agent(model, optimizer, OLDSGD(tau=1), "ring", comm)
    model[8].requires_grad_(True)
    Loop().backward(model, optimizer, comm.rank, 0)
    with pytest.raises(UserError, match=r"8\.weight is trained but not mixed.*agent\.rebuild\(\)"):
        agent.step()
    agent.finish()


def test_a_step_after_the_end_is_an_error(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=1), "ring", comm) as agent:
        agent.on_round.append(lambda a: a.stop() if a.r == 1 else None)
        Loop().backward(model, optimizer, comm.rank, 0)
        assert agent.step() is False
        with pytest.raises(UserError, match="leave the loop"):
            agent.step()
    with pytest.raises(UserError, match=r"after finish\(\)"):
        agent.step()
    optimizer.step()  # the optimizer is the user's again


def test_a_left_over_optimizer_step_is_noticed(comm):
    """Beside agent.step(), instead of it, and by a GradScaler."""
    model = cnn()
    optimizer, _ = Loop().make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        Loop().backward(model, optimizer, comm.rank, 0)
        before = agent.x.clone()
        with pytest.raises(UserError, match=r"agent\.step\(\) in place of optimizer\.step\(\)"):
            optimizer.step()
        scaler.scale(torch.ones(()))
        with pytest.raises(UserError, match=r"in place of optimizer\.step\(\)"):
            scaler.step(optimizer)
        assert torch.equal(agent.x, before)
        agent.step()


def test_the_padded_mean_does_not_pass_for_a_vector_of_parameters(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        mean = agent.mean()
        with pytest.raises(UserError, match=r"mean_state_dict\(\)"):
            nn.utils.vector_to_parameters(mean, agent.model.parameters())
        agent.x.copy_(mean)  # what it is for
        assert torch.equal(mean, agent.x) and type(mean.clone()) is torch.Tensor
        assert type(copy.deepcopy(mean)) is torch.Tensor
    one = nn.Linear(16, 1, bias=False)  # nothing is padded
    with Agent(one, sgd(one), OLDSGD(tau=2), "ring", comm) as agent:
        nn.utils.vector_to_parameters(agent.mean(), one.parameters())


class HoldsData(torch.optim.Optimizer):
    """As apex and others: the memory of the parameters from when it was made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        kept = {"here": [p.data for p in self.param_groups[0]["params"]]}
        self.helper = SimpleNamespace(kept=kept, owner=self)

    def step(self, closure: Any = None) -> None:
        for p, data in zip(self.param_groups[0]["params"], self.helper.kept["here"], strict=True):
            data.sub_(p.grad, alpha=0.5)


def test_an_optimizer_that_holds_p_data_trains_the_model(comm):
    model = Grows(1.0)
    with Agent(model, HoldsData([model.a]), LDSGD(tau=2), "ring", comm) as agent:
        model.backward()
        agent.step()
        assert model.a.tolist() == [0.5] * 3 == agent.x[:3].tolist()


class HidesData(HoldsData):
    """Where nobody finds it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        kept, self.helper = self.helper.kept["here"], None
        self.write = lambda: [data.sub_(0.5) for data in kept]

    def step(self, closure: Any = None) -> None:
        self.write()


def test_an_optimizer_that_trains_what_the_model_has_left_is_named(comm):
    model = Grows(1.0)
    agent = Agent(model, HidesData([model.a]), LDSGD(tau=2), "ring", comm)
    model.backward()
    with pytest.raises(UserError, match="HidesData keeps a part of a parameter's memory"):
        agent.step()
    agent.finish()


@pytest.mark.parametrize("kind", ["old", "new"])
def test_spectral_norms_vectors_stay_each_ranks_own(comm, kind):
    norm = {"old": nn.utils.spectral_norm, "new": nn.utils.parametrizations.spectral_norm}[kind]
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), norm(nn.Linear(4, 2)))
    optimizer = sgd(model)
    with Agent(model, optimizer, LSGD(tau=1), "ring", comm) as agent:
        names = [slot.name for slot in agent.flat.slots]
        assert "1.running_mean" in names and not any(n.endswith(("_u", "_v")) for n in names)
        torch.manual_seed(comm.rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            agent.step()
    for name, buffer in model.named_buffers():
        if name.endswith(("_u", "_v")):
            torch.testing.assert_close(buffer.norm(), torch.tensor(1.0))


BAD: dict[str, Any] = {
    r"Agent has no option 'tau'.*algorithm=OLDSGD\(tau=5\)": {"tau": 5},
    r"Agent has no option 'form'.*algorithm=OLDSGD\(form='delta'\)": {"form": "delta"},
    r"Agent has no option 'auto': hpc_oldsgd.make_plan\(": {"auto": True},
    "Agent has no option 'progres'; did you mean progress": {"progres": "poll"},
    r"OLDSGD is a class: pass OLDSGD\(\)": {"algorithm": OLDSGD},
    "algorithm is a name or an Algorithm, not int": {"algorithm": 5},
    "topology is a name or a Topology, not": {"topology": 4},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named_with_the_right_ones(comm, message):
    model = cnn()
    with pytest.raises(UserError, match=message):
        Agent(model, Loop().make(model)[0], **{"comm": comm, **BAD[message]})


def test_an_optimizer_that_needs_a_closure_is_refused(comm):
    model = nn.Linear(3, 2)
    with pytest.raises(UserError, match="LBFGS calls the loss itself"):
        Agent(model, torch.optim.LBFGS(model.parameters()), OLDSGD(), "ring", comm)


def assigned(model: nn.Module) -> None:
    model.load_state_dict(cnn(seed=3).state_dict(), assign=True)


def cast(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def replaced(model: nn.Module) -> None:
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())


@pytest.mark.parametrize(
    "change, message",
    [
        (assigned, r"0\.weight was replaced.*load_state_dict without assign=True"),
        (replaced, r"4\.weight was replaced"),
        (cast, r"0\.weight was moved out of the agent's buffer: .* before the Agent is made"),
    ],
)
def test_a_model_that_leaves_x_is_noticed_at_the_next_step(comm, change, message):
    model = cnn()
    optimizer, _ = Loop().make(model)
    agent = Agent(model, optimizer, OLDSGD(tau=50), "ring", comm)
    change(model)
    with pytest.raises(UserError, match=message):
        agent.step()
    agent.finish()


def test_two_types_that_do_not_go_together_are_refused(comm):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(torch.bfloat16)
    model[1].float()
    message = r"1\.weight is torch\.float32, 0\.weight is .*model\.to\(torch\.bfloat16\)"
    with pytest.raises(UserError, match=message):
        Agent(model, sgd(model), LUGT(), "ring", comm)
    with pytest.raises(UserError, match=r"does not fit the wire type torch\.float32"):
        double = nn.Sequential(nn.Linear(3, 3).double(), nn.LayerNorm(3).half())
        Agent(double, sgd(double), OLDSGD(), "ring", comm, wire="fp32")
