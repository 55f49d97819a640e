"""Ordinary training loops with an Agent, and the same loops with all agents in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from hpc_oldsgd import topology
from hpc_oldsgd.runtime.agent import Agent
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.swarm import Swarm
from support.small_problems import OPTIMIZERS, backward, cnn

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
