"""Where the agents of a run live: all in this process, or one in each rank (mpi_backend.py)."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..algorithms import Algorithm
from ..checkpoints.store import Checkpoint
from ..data import Shard
from ..runtime.agent_runner import AgentRunner
from ..runtime.sgd import Optimizer
from ..simulation.clock import Clock
from ..simulation.slowdown import Slowdown
from ..simulation.stacked import StackedTransport
from ..simulation.swarm import Swarm
from ..simulation.vmap_gradients import VmapGradients
from ..tasks import Task
from ..topology import Topology
from ..training.choose import MARGIN, choose
from ..training.loop import Worker
from ..training.measure import about
from ..training.options import SimulateOptions
from ..training.plan import Allowed, Measured, Message, Plan
from .spec import Spec

if TYPE_CHECKING:
    from .session import Session

T = TypeVar("T")
Models = Sequence[nn.Module]
Optimizers = Sequence[Optimizer]
Graphs = Mapping[str, Topology]
"""Those that a run may choose from, by name."""


class Backend(ABC):
    """What differs between `train` and `simulate`. What is given here suits a single process."""

    kind: str
    """As the manifest of a checkpoint names it."""
    time_unit: str
    n: int
    here: Sequence[int]
    """The agents of this process."""
    part: int
    parts: int
    """Which file of a checkpoint this process writes, and how many there are."""
    device: torch.device
    title = ""
    """What the title of a run says besides."""
    where = ""
    """What its first line says besides."""
    took_over = False
    """Whether this process speaks for a rank 0 that has died."""

    @property
    def first(self) -> bool:
        """Whether this process writes the run's folder."""
        return self.here[0] == 0

    def check(self, step: Callable[[], T]) -> T:
        """Run a step in all processes. Collective: a UserError of one is raised by all."""
        return step()

    def gather(self, text: str) -> list[str]:
        """Every process's text. Collective."""
        return [text]

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error of one process ends all of them."""
        return contextlib.nullcontext()

    @abstractmethod
    def prepare(self, algorithm: Algorithm, graphs: Graphs) -> None:
        """Checks of its own, in `check`."""

    def set_threads(self, threads: int) -> None:
        """Of torch; 0 if any number will do."""
        if threads:
            torch.set_num_threads(threads)

    @abstractmethod
    def choose(self, spec: Spec[Any], graphs: Graphs, model: nn.Module, shard: Shard) -> Plan:
        """What --auto, --tau auto and --fragments auto ask for. Collective."""

    @abstractmethod
    def parts_of(self, found: Checkpoint, average: bool) -> list[int]:
        """Which files of a checkpoint this process reads."""

    @abstractmethod
    def make_runner(
        self, models: Models, optimizers: Optimizers, algorithm: Algorithm, topology: Topology
    ) -> AgentRunner | Swarm: ...

    def make_vmap(self, task: Task, workers: Sequence[Worker]) -> VmapGradients | None:
        """Where all gradients are taken in one pass."""
        return None

    def make_slowdown(self, runner: AgentRunner | Swarm) -> Slowdown | None:
        """What makes the agents of this process slow, where real time does not suffice."""
        return None

    def ready(self, session: Session) -> None:  # noqa: B027
        """The loop is made and the run has not begun."""

    @abstractmethod
    def run(self, session: Session) -> None:
        """The rounds. Raises Diverged, in every process alike."""

    @abstractmethod
    def finish(self, session: Session) -> None:
        """Every flight ends here, and files that need all processes are written. Collective."""

    def leave(self, told: str) -> str:
        """Wait for all processes, as the last thing: what the first of them has told."""
        return told

    def about_transport(self, runner: AgentRunner | Swarm) -> dict[str, Any]:
        """For config.json."""
        return {}

    def about_end(self) -> dict[str, Any]:
        """For summary.json."""
        return {}


class Stacked(Backend):
    """All agents in this process, in simulated time."""

    kind, time_unit = "simulate", "units"
    part, parts = 0, 1
    device = torch.device("cpu")

    def __init__(self, options: SimulateOptions) -> None:
        self.options, self.n, self.here = options, options.agents, range(options.agents)
        self.title = f"c = {options.c:g}, "

    def prepare(self, algorithm: Algorithm, graphs: Graphs) -> None:
        self._clock()

    def choose(self, spec: Spec[Any], graphs: Graphs, model: nn.Module, shard: Shard) -> Plan:
        options, c = self.options, self.options.c
        key, all_reduce = f"{options.topology} {options.wire}", 2 * (self.n - 1) / self.n * c
        measured = Measured(1.0, {key: Message(c)}, all_reduce, 0, options.jitter)
        given = {"topology": options.topology, "wire": options.wire}
        allowed = Allowed.of(options.choice, spec.algorithm, **given)
        made = choose(
            spec.algorithm, graphs, measured, allowed, margin=MARGIN if options.jitter else 1.0,
            speed=np.array(options.speeds()), degree_aware=options.degree_aware,
        )  # fmt: skip
        return about(made, measured, spec.algorithm, self.n, model)

    def parts_of(self, found: Checkpoint, average: bool) -> list[int]:
        return list(range(found.count))

    def make_runner(
        self, models: Models, optimizers: Optimizers, algorithm: Algorithm, topology: Topology
    ) -> Swarm:
        options = self.options
        wire = options.wire_dtype(next(models[0].parameters()).dtype)
        transport = StackedTransport(topology, self._clock(), wire, options.late_policy())
        return Swarm(models, optimizers, algorithm, transport, buffers=options.buffers)

    def make_vmap(self, task: Task, workers: Sequence[Worker]) -> VmapGradients | None:
        return VmapGradients(task, workers) if self.options.gradients == "together" else None

    def run(self, session: Session) -> None:
        if not session.runner.started:
            session.runner.start()
        session.loop.run()

    def finish(self, session: Session) -> None:
        session.runner.finish()

    def _clock(self) -> Clock:
        options = self.options
        speed = np.array(options.speeds())
        return Clock(self.n, options.c, speed, options.jitter, options.degree_aware, options.seed)
