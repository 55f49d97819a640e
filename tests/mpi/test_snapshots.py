"""What is sent is x as it is when it is sent, also where the mix has written the snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_oldsgd import topology
from hpc_oldsgd.algorithms import OLDSGD, Algorithm
from hpc_oldsgd.runtime.agent import Agent
from hpc_oldsgd.runtime.runner import Runner, Schedule
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm
from hpc_oldsgd.transport.base import Transport
from hpc_oldsgd.transport.mpi import MpiTransport
from support.small_problems import cnn, rows
from support.training_loops import Loop

STEPS, D = 6, 103


@dataclass
class Changed(Algorithm):
    """Mixes, keeps the snapshot, and changes x before it is sent."""

    tau: int = 1
    how: str = "descend"
    reads_gradient: ClassVar[bool] = False

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            first, last = agent.exchange(agent.x), agent.exchange(agent.x)
            g = yield
            if self.how != "descend":
                agent.descend(g)
            if self.how != "mix again":
                first.mix_into(agent.x)
            last.mix_into(agent.x, snapshot=True)
            if self.how == "descend":
                agent.descend(g)
            elif self.how == "in place":
                agent.x.mul_(0.9)
            else:
                first.mix_into(agent.x)


@dataclass
class SentLater(Algorithm):
    """Mixes, keeps the snapshot, and sends it after another gradient, which it does not use."""

    tau: int = 2
    reads_gradient: ClassVar[bool] = False

    def schedule(self, agent: Runner) -> Schedule:
        for _ in agent.rounds():
            flight = agent.exchange(agent.x)
            g = yield
            agent.descend(g)
            flight.mix_into(agent.x, snapshot=True)
            yield


Change = Callable[[nn.Module, int], None]


def equals_the_simulator(
    comm: MPI.Comm,
    algorithm: Algorithm,
    at_boundary: Change | None = None,
    between: Change | None = None,
    act: Callable[[Any, int], None] | None = None,
) -> None:
    """Rank i's x is row i of the simulator's after every step."""
    n, own = comm.size, comm.rank
    models = [cnn() for _ in range(n)]
    optimizers = [Loop().make(m)[0] for m in models]
    swarm = Swarm(models, optimizers, algorithm, StackedTransport(topology.from_name("ring", n)))
    swarm.start()
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, algorithm, "ring", comm) as agent:
        if at_boundary is not None:
            swarm.on_round.append(lambda _: [at_boundary(m, i) for i, m in enumerate(models)])  # type: ignore[arg-type]
            agent.on_round.append(lambda _: at_boundary(model, own))
        for k in range(STEPS):
            for i, m in enumerate(models):
                Loop().backward(m, optimizers[i], i, k)
                if between is not None:
                    between(m, i)
            Loop().backward(model, optimizer, own, k)
            if between is not None:
                between(model, own)
            swarm.step()
            agent.step()
            if act is not None:
                act(swarm, k)
                act(agent, k)
            assert torch.equal(agent.x, swarm.x[own]), f"step {k}"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["descend", "in place", "mix again"])
def test_a_schedule_that_changes_x_after_the_mix(comm, how):
    equals_the_simulator(comm, Changed(how=how))


def shrink(model: nn.Module, i: int) -> None:
    with torch.no_grad():
        model[4].weight.mul_(0.5 + 0.1 * i)


def shrink_data(model: nn.Module, i: int) -> None:
    """Without a trace in any version counter."""
    model[4].weight.data.mul_(0.5 + 0.1 * i)


def shrink_on_one_rank(model: nn.Module, i: int) -> None:
    if i == 0:
        shrink_data(model, i)


@pytest.mark.max_ranks(4)  # the same on more
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", [shrink, shrink_data, shrink_on_one_rank])
@pytest.mark.parametrize("when", ["at_boundary", "between"])
def test_weights_that_the_user_changes(comm, when, change):
    for algorithm in (OLDSGD(tau=2), Changed(how="in place"), SentLater()):
        equals_the_simulator(comm, algorithm, **{when: change})


@pytest.mark.mpi(min_size=2)
def test_a_state_that_is_loaded(comm):
    saved: dict[int, Any] = {}

    def act(runner: Any, k: int) -> None:
        if k == 1:
            saved[id(runner)] = {
                key: value.clone() if key == "x" else value
                for key, value in runner.state_dict().items()
            }
        elif k == 3:
            runner.load_state_dict(saved[id(runner)])

    equals_the_simulator(comm, OLDSGD(tau=1), act=act)


@pytest.mark.mpi(min_size=2)
def test_x_changed_on_one_rank_only_travels_by_the_same_channel(comm):
    """Whether a snapshot is current may differ from rank to rank; the channel must not."""
    graph = topology.from_name("ring", comm.size)
    ours = changed_on_rank_zero(MpiTransport(comm, graph), rows(comm.size, D)[comm.rank], comm.rank)
    theirs = changed_on_rank_zero(StackedTransport(graph), rows(comm.size, D), slice(None))
    assert torch.equal(ours, theirs[comm.rank])


def changed_on_rank_zero(
    transport: Transport, x: torch.Tensor, agents: int | slice
) -> torch.Tensor:
    first, last = transport.exchange(x, 0), transport.exchange(x, 0)
    first.mix_into(x)
    last.mix_into(x, snapshot=True)
    if agents == 0:
        x.mul_(2.0)
    elif isinstance(agents, slice):
        x[0].mul_(2.0)
    z = -x
    of_x, of_z = transport.exchange(x, 1), transport.exchange(z, 1)
    of_x.mix_into(x)
    of_z.mix_into(z)
    transport.close()
    return x


class Copies(TorchDispatchMode):
    """Counts copies as long as x."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.shape, self.count = x.shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("hooked", [False, True])
def test_the_snapshot_that_the_mix_wrote_is_not_copied_again(comm, hooked):
    """Unless a hook of the user had control: it may have changed weights through p.data."""
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=1), "ring", comm) as agent:
        (agent.on_round if hooked else agent.observers).append(lambda _: None)
        for k in range(STEPS):
            Loop().backward(model, optimizer, comm.rank, k)
            with Copies(agent.x) as copies:
                agent.step()
            assert copies.count == hooked
