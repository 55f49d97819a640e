"""The drop-in on real models: the MPI run is the simulator's run, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mpi4py import MPI
from problems import OPTIMIZERS, backward, cnn
from torch import nn

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.agent import Agent
from hpc_oldsgd.algorithms import LDSGD, LSGD, OLDSGD
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.swarm import Swarm
from hpc_oldsgd.transport.stacked import StackedTransport

STEPS = 10


@dataclass
class Loop:
    """What an ordinary training loop does before `step()`."""

    optimizer: str = "sgd"
    clip: float | None = None
    scheduler: bool = False
    accumulate: int = 1
    set_to_none: bool = True

    def make(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[self.optimizer](trained)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)

    def backward(self, model: nn.Module, optimizer: torch.optim.Optimizer, i: int, k: int) -> None:
        optimizer.zero_grad(self.set_to_none)
        for part in range(self.accumulate):
            backward(model, i, k * self.accumulate + part)
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            assert norm > self.clip  # or the test would show nothing


LOOPS = {
    "sgd": Loop(),
    "momentum": Loop("momentum"),
    "weight decay": Loop("decay", set_to_none=False),
    "adamw": Loop("adamw"),
    "clipped": Loop("momentum", clip=0.05),
    "scheduled": Loop("adamw", scheduler=True),
    "accumulated": Loop("momentum", accumulate=3),
}


def simulated(comm: MPI.Comm, *args: Any, **options: Any) -> list[torch.Tensor]:
    """X after every step; rank 0 runs all agents."""
    history = _simulated(comm.size, *args, **options) if comm.rank == 0 else None
    shared: list[torch.Tensor] = comm.bcast(history)
    return shared


def _simulated(
    n: int, loop: Loop, algorithm: Any, graph: str, **options: Any
) -> list[torch.Tensor]:
    wire = options.pop("wire", None)
    models = [cnn() for _ in range(n)]
    made = [loop.make(model) for model in models]
    transport = StackedTransport(topology.from_name(graph, n), wire=wire)
    swarm = Swarm(models, [o for o, _ in made], algorithm, transport, **options)
    swarm.start()
    history = []
    for k in range(STEPS):
        for i, model in enumerate(models):
            loop.backward(model, made[i][0], i, k)
        swarm.step()
        for _, scheduler in made:
            if loop.scheduler:
                scheduler.step()
        history.append(swarm.x.clone())
    return history


def trained(comm: MPI.Comm, loop: Loop, algorithm: Any, graph: str, **options: Any) -> Any:
    """This rank's x after every step, and the model."""
    model = cnn(seed=comm.rank)  # rank 0's is taken by all
    optimizer, scheduler = loop.make(model)
    history = []
    with Agent(model, optimizer, algorithm, graph, comm, **options) as agent:
        for k in range(STEPS):
            loop.backward(model, optimizer, comm.rank, k)
            assert agent.step()
            if loop.scheduler:
                scheduler.step()
            history.append(agent.x.clone())
        mean = agent.mean()
    return history, mean, agent


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


def no_gradient(model: nn.Module) -> None:
    model.requires_grad_(False)


def half(model: nn.Module) -> None:
    model[4].to(torch.bfloat16)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "change, named",
    [
        (other_layer, r"rank 1 has another .* 11\.weight\[3x3\]"),
        (other_shape, r"rank 1 has another .* 4\.weight\[8x180\]:float32 instead of 4\.weight\[7x"),
        (other_frozen, r"rank 1 has another .* 8\.weight\[9x7\]"),
        (unfrozen, r"rank 1 has another .* 8\.weight\[7x7\]"),
        (no_gradient, r"rank 1: the model has no parameters that require a gradient"),
        (half, r"rank 1: 4\.weight is torch.bfloat16"),
    ],
)
def test_another_model_on_one_rank_is_found_and_named(comm, change, named):
    model = cnn()
    if comm.rank == 1:
        change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=named):
        Agent(model, optimizer, OLDSGD(), "ring", comm)


@pytest.mark.ranks(2)
def test_another_algorithm_on_one_rank_is_found_and_named(comm):
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"rank 1 has another .*tau=6.* instead of .*tau=5"):
        Agent(model, optimizer, OLDSGD(tau=5 + (comm.rank == 1)), "ring", comm)


@pytest.mark.ranks(1, 3)
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
                agent.load_state_dict(saved)
                model.load_state_dict(saved["buffers"], strict=False)
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


def test_weights_changed_at_a_round_boundary_are_what_is_sent(comm):
    """The mix has written the next snapshot already; a hook that changes weights undoes that."""
    n, own = comm.size, comm.rank

    def shrink(runner: Any, model: nn.Module, i: int) -> None:
        if runner.r:
            with torch.no_grad():
                model[4].weight.mul_(0.5 + 0.1 * i)

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
