"""The drop-in on real models: the MPI run is the simulator's run, bit for bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from mpi4py import MPI
from torch import nn

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import KGT, LDSGD, LSGD, OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.agent import Agent
from support.small_problems import cnn
from support.training_loops import LOOPS, STEPS, Loop, simulated, trained


@pytest.mark.parametrize("loop", LOOPS.values(), ids=list(LOOPS))
def test_every_training_loop_is_the_simulators(comm, loop):
    expected = simulated(comm, loop, OLDSGD(tau=3), "ring")
    history, mean, _ = trained(comm, loop, OLDSGD(tau=3), "ring")
    for t, (x, X) in enumerate(zip(history, expected, strict=True)):
        assert torch.equal(x, X[comm.rank]), f"step {t}"
    torch.testing.assert_close(mean, expected[-1].mean(0))
    if comm.size > 1:
        assert not torch.equal(expected[-1][0], expected[-1][1])


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_is_the_simulators(comm, name):
    cls = algorithms.get(name)
    algorithm = cls() if cls().tau == 1 else cls(tau=3)
    expected = simulated(comm, Loop(), algorithm, "ring")
    history, _, _ = trained(comm, Loop(), algorithm, "ring")
    assert all(torch.equal(x, X[comm.rank]) for x, X in zip(history, expected, strict=True))


OPTIONS = [
    {"progress": "poll"},
    {"progress": "none", "native": False},
    {"staging": "host"},
    {"progress": "poll", "staging": "host"},
    {"staging": "direct"},
    {"progress": "poll", "staging": "direct"},
    {"native": False, "largest_message_bytes": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("algorithm", [OLDSGD(tau=2), LSGD(tau=3)], ids=str)
def test_the_way_messages_move_changes_nothing(comm, options, algorithm):
    loop = Loop("momentum")
    expected = simulated(comm, loop, algorithm, "ring")
    history, _, _ = trained(comm, loop, algorithm, "ring", **options)
    assert all(torch.equal(x, X[comm.rank]) for x, X in zip(history, expected, strict=True))


@pytest.mark.parametrize("graph", ["complete", "one-peer-ring", "torus"])
def test_graphs(comm, graph):
    try:
        topology.from_name(graph, comm.size)
    except UserError:
        pytest.skip(f"no {graph} of {comm.size}")
    expected = simulated(comm, Loop(), OLDSGD(tau=2), graph)
    history, _, _ = trained(comm, Loop(), OLDSGD(tau=2), graph)
    assert all(torch.equal(x, X[comm.rank]) for x, X in zip(history, expected, strict=True))


@pytest.mark.parametrize("buffers", ["mix", "local"])
@pytest.mark.parametrize("wire", [None, "bf16", "fp16"])
def test_buffers_and_wire(comm, buffers, wire):
    types = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
    loop = Loop("adamw")
    expected = simulated(comm, loop, OLDSGD(tau=2), "ring", buffers=buffers, wire=types[wire])
    history, _, agent = trained(comm, loop, OLDSGD(tau=2), "ring", buffers=buffers, wire=wire)
    assert all(torch.equal(x, X[comm.rank]) for x, X in zip(history, expected, strict=True))
    names = [slot.name for slot in agent.flat.slots]
    assert ("1.running_mean" in names) == (buffers == "mix")
    assert "1.num_batches_tracked" not in names


def test_buffers_are_mixed_with_the_parameters(comm):
    """LSGD leaves all agents with the same model: running statistics too, unless they are local."""
    for buffers, alike in (("mix", True), ("local", comm.size == 1)):
        model = cnn(batchnorm=True)
        optimizer, _ = Loop().make(model)
        with Agent(model, optimizer, LSGD(tau=1), "ring", comm, buffers=buffers) as agent:
            for k in range(2):
                Loop().backward(model, optimizer, comm.rank, k)
                agent.step()
        everyone = comm.allgather(model[1].running_mean.tolist())
        assert all(row == everyone[0] for row in everyone) == alike
        assert model[1].num_batches_tracked == 2


@pytest.mark.ranks(1, 2)
def test_alone_an_agent_is_its_optimizer(comm):
    """n = 1: whatever the algorithm, the loop with a bare optimizer. On every rank by itself."""
    for loop in LOOPS.values():
        for algorithm in (OLDSGD(tau=3), LDSGD(tau=2)):
            _, _, agent = trained(MPI.COMM_SELF, loop, algorithm, "ring")
            model = cnn(seed=0)
            optimizer, scheduler = loop.make(model)
            for k in range(STEPS):
                loop.backward(model, optimizer, 0, k)
                optimizer.step()
                if loop.scheduler:
                    scheduler.step()
            for own, bare in zip(agent.model.parameters(), model.parameters(), strict=True):
                assert torch.equal(own, bare)


def test_gradient_form_is_the_papers_sum(comm):
    """The simulator's gradient form exactly, the delta form up to rounding."""
    form = OLDSGD(tau=3, form="gradient")
    expected = simulated(comm, Loop(), form, "ring", buffers="local")
    history, _, _ = trained(comm, Loop(), form, "ring", buffers="local")
    delta, _, _ = trained(comm, Loop(), OLDSGD(tau=3), "ring", buffers="local")
    for x, X, same in zip(history, expected, delta, strict=True):
        assert torch.equal(x, X[comm.rank])
        torch.testing.assert_close(x, same, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["momentum", "decay", "adamw"])
def test_gradient_form_wants_plain_sgd(comm, optimizer):
    model = cnn()
    with pytest.raises(UserError, match=r'form="delta" with this optimizer'):
        Agent(model, Loop(optimizer).make(model)[0], OLDSGD(form="gradient"), "ring", comm)


def test_gradient_form_refuses_to_mix_running_statistics(comm):
    model = cnn()
    with pytest.raises(UserError, match=r'buffers="local" or form="delta"'):
        Agent(model, Loop().make(model)[0], OLDSGD(form="gradient"), "ring", comm)


class Fixed(nn.Module):
    """Its gradient is 1 wherever it is."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((3,), start)) for _ in range(2))

    def backward(self) -> None:
        (self.a + self.b).sum().backward()


def test_gradient_form_takes_a_step_size_that_changes_between_rounds(comm):
    """tau = 1 too, where every step of a scheduler is between two rounds."""
    for tau in (1, 2):
        model = Fixed(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, tau, 0.5)
        with Agent(model, optimizer, OLDSGD(tau=tau, form="gradient"), "ring", comm) as agent:
            for _ in range(3 * tau):
                optimizer.zero_grad()
                model.backward()
                agent.step()
                scheduler.step()
        torch.testing.assert_close(model.a.detach(), torch.full((3,), -1.75 * tau))


def test_gradient_form_refuses_weights_that_somebody_else_changed(comm):
    """It would take them back at the end of the round; the delta form keeps them."""
    for form in ("gradient", "delta"):
        model = Fixed(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        agent = Agent(model, optimizer, OLDSGD(tau=2, form=form), "ring", comm)
        for t in range(4):
            if t == 3:
                model.load_state_dict(Fixed(7.0).state_dict())
            optimizer.zero_grad()
            model.backward()
            if t == 3 and form == "gradient":
                with pytest.raises(UserError, match="weights were changed inside a round"):
                    agent.step()
            else:
                agent.step()
        assert model.a.tolist() == [7.0 if form == "gradient" else 6.0] * 3
        agent.finish()


@pytest.mark.parametrize("algorithm", [OLDSGD(tau=2, form="gradient"), KGT(tau=2)], ids=str)
def test_several_step_sizes_are_refused_where_one_is_computed_with(comm, algorithm):
    model = Fixed(0.0)
    groups = [{"params": [model.a]}, {"params": [model.b]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    agent = Agent(model, optimizer, algorithm, "ring", comm)
    optimizer.param_groups[1]["lr"] = 0.2
    with pytest.raises(UserError, match="one step size"):
        for _ in range(2):
            optimizer.zero_grad()
            model.backward()
            agent.step()
    agent.finish()


def test_no_hook_is_left_behind(comm):
    model = Fixed(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm, progress="poll") as agent:
        pass
    transport = weakref.ref(agent.transport)
    del agent
    gc.collect()
    assert transport() is None
