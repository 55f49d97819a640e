"""The drop-in: `loss.backward(); agent.step()` in place of `optimizer.step()`."""

from __future__ import annotations

import os
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..algorithms import Algorithm
from ..errors import UserError
from ..topology import Topology
from ..torch_private import not_compiled
from ..transport.base import Flight, Pending, Reduction, Wire
from ..transport.trace import Trace
from . import agent_state, mean_model, uneven_data
from .agent_checks import refuse_alone, watch
from .agent_runner import AgentRunner
from .as_optimizer import AgentOptimizer
from .flat import Buffers
from .sgd import Optimizer
from .uneven_data import Batch, Until

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class _UsersView(ABCMeta):
    """help(Agent) and dir(Agent) show what a training loop calls, not what an algorithm sees."""

    SHOWN = (
        "__doc__", "__init__", "step", "finish", "stop", "rank", "n", "at_boundary", "batches",
        "mean", "mean_state_dict", "mean_weights", "metrics", "state_dict", "load_state_dict",
        "save", "load", "rebuild", "as_optimizer",
    )  # fmt: skip

    def __dir__(cls) -> list[str]:
        return list(cls.SHOWN)


class Agent(AgentRunner, metaclass=_UsersView):
    """One MPI rank's model, trained by a decentralized algorithm.

        with Agent(model, optimizer, OLDSGD(tau=5), topology="ring") as agent:
            for x, y in agent.batches(loader):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                agent.step()

    The trained parameters and the float buffers become views of one flat tensor `agent.x`: make
    the agent after the model is on its device, and change weights in place. `agent.t` counts steps
    and `agent.r` rounds; functions in the list `agent.on_round` are called at every round boundary.

    All ranks make the same calls in the same order. One that waits `timeout_s` for another ends the
    job and names it.
    """

    several_types = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm | str = "oldsgd",
        topology: Topology | str = "ring",
        comm: MPI.Comm | None = None,
        *,
        buffers: Buffers = "mix",
        sync: bool | None = None,
        wire: Wire | str = None,
        trace: Trace | None = None,
        timeout_s: float | None = 600.0,
        **transport_options: Any,
    ) -> None:
        """Collective.

        sync: True starts all ranks from rank 0's model. False keeps each rank's own. None is True,
        with a warning if the ranks differ.
        buffers: "mix" averages running statistics and other float buffers with the weights, "local"
        leaves them to each rank.
        wire: a narrower type for the messages, for instance "bf16"; "int8" and "int4" send changes.
        timeout_s: None waits for ever.
        transport_options: progress, staging, all_reduce and others of MpiTransport.
        """
        self._notices: Any = None  # the first messages leave before they are there
        self.may_step = self._inside_step = self._at_mean = False
        self._measured_s = 0.0
        self._as_optimizer: AgentOptimizer | None = None
        super().__init__(
            model, optimizer, algorithm, topology, comm, buffers=buffers, sync=sync, wire=wire,
            trace=trace, timeout_s=timeout_s, **transport_options,
        )  # fmt: skip
        self._watch_optimizer()
        if self.n > 1:
            from ..transport.mpi import Notices

            self._notices = Notices(self.transport.comm, self.transport.count_open)
            self.transport.look = self._notices.look

    def __repr__(self) -> str:
        wire = self.transport.wire or self.flat.dtype
        return (
            f"<Agent {self.rank} of {self.n}: {self.algorithm} on {self.transport.topology.name}, "
            f"{type(self.optimizer).__name__}, d = {self.flat.d:,} {self.flat.dtype}, wire {wire}, "
            f"step {self.t}, round {self.r}{', finished' if self.finished else ''}>"
        ).replace("torch.", "")

    def __dir__(self) -> list[str]:
        return [*dir(type(self)), "t", "r", "x", "on_round", "model", "optimizer", "algorithm"]

    # -- the training loop ---------------------------------------------------------------------

    @not_compiled
    def step(self) -> bool:
        """After `loss.backward()`: the local step, and at the end of a round the mixing.

        False once `stop()` has ended the training: then leave the loop.
        """
        if self.transport.closed:
            raise UserError("step() after finish(): make a new Agent to train on")
        if self.finished:
            raise UserError("the agent has stopped: leave the loop when step() returns False")
        if self._at_mean:
            raise UserError("step() inside mean_weights() would train the mean: leave it first")
        self.flat.check_parameters()
        for other in self.others.flats:
            other.check_parameters()
        self._inside_step = True
        try:
            return super().step()
        finally:
            self._inside_step = False
            if self._notices is not None:
                self._notices.t = self.t

    def batches(self, loader: Iterable[Batch], until: Until = "shortest") -> Iterator[Batch]:
        """The batches of `loader`, so many that all ranks take the same number of steps.

        "shortest" ends on all ranks when the first has no more data. If all loaders have a length
        that is exactly there, else within the next three rounds. "longest" goes on until the last
        rank has no more. A rank without data takes steps without a gradient, and is mixed.
        Collective.
        """
        return uneven_data.batches(self, loader, until)

    def stop(self) -> None:
        """End the training at this round boundary: call it in `on_round`, on all ranks alike."""
        super().stop()

    def finish(self) -> None:
        """Complete every message and free what they used; a `with` block calls it. Collective."""
        notices, self._notices = self._notices, None
        if notices is not None and not self.transport.shrunk:
            notices.tell_end(self._stop)
        super().finish()
        if notices is not None and not self.transport.shrunk:
            notices.close(self.transport.timeout_s)

    def rebuild(self, optimizer: Optimizer | None = None) -> None:
        """After layers were unfrozen or added, and are in the optimizer. Between two rounds.

        Every rank keeps its weights, counters and the algorithm's state; a new layer starts as
        rank 0's. Collective.
        """
        self._check_boundary("rebuild()")
        self.optimizer = optimizer or self.optimizer
        self.lay_out_anew()
        self._watch_optimizer()

    def as_optimizer(self) -> AgentOptimizer:
        """A torch optimizer whose `step()` is the agent's, for frameworks, GradScaler, schedulers.

        Its `state_dict()` is the agent's whole state.
        """
        if self._as_optimizer is None:
            self._as_optimizer = AgentOptimizer(self)
        return self._as_optimizer

    # -- the mean of all agents, and what is measured ------------------------------------------

    def mean(self) -> Tensor:
        """The average of all x, laid out like x: `agent.x.copy_(agent.mean())`. Collective."""
        return mean_model.like_x(self.average(), self.flat)

    def mean_state_dict(self) -> dict[str, Tensor]:
        """The mean model as a state_dict of plain tensors, to save or to export. Collective."""
        return mean_model.mean_state_dict(self)

    def mean_weights(self) -> AbstractContextManager[None]:
        """`with agent.mean_weights():` the model is the mean model, to evaluate it. Collective."""
        return self._hold(mean_model.mean_weights(self))

    def metrics(self) -> dict[str, float]:
        """Of this rank, since the last call; nothing is measured before the first call.

        step, round; transfer_s and exposed_s: the mean time of a message and of the wait for it;
        hidden: the share of the transfer nobody waited for; consensus: the weighted squared
        distance to the neighbours.
        """
        self.transport.measure_distance = True
        recent = [f for f in self.transport.records if f.completed > self._measured_s]
        found: dict[str, float] = {"step": self.t, "round": self.r}
        if recent:
            self._measured_s = max(f.completed for f in recent)
            transfer = sum(f.transfer for f in recent)
            exposed = sum(f.exposed for f in recent)
            found["transfer_s"] = transfer / len(recent)
            found["exposed_s"] = exposed / len(recent)
            found["hidden"] = max(0.0, 1.0 - exposed / transfer) if transfer else 1.0
        if self.transport.distance is not None:
            found["consensus"] = float(self.transport.distance) + self.others.distance
        return found

    # -- save and resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of this rank's: x, frozen weights, counters, algorithm, optimizer, and the random
        generators. No copies.

        Between two rounds: when `agent.at_boundary` is True, after `scheduler.step()`.
        """
        self.flat.adopt()
        outside = {name: tensor.detach() for name, tensor in self.flat.outside()}
        return {
            **super().state_dict(),
            "outside": outside,
            "made": agent_state.made(self),
            "random": agent_state.random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same algorithm, model and number of ranks. Collective."""
        self._startup.check(lambda: agent_state.check(self, state))
        agent_state.check_same_step(self, state)
        own = dict(self.flat.outside())
        with torch.no_grad():
            for name, tensor in state.get("outside", {}).items():
                own[name].copy_(tensor)
        super().load_state_dict(state)
        if "random" in state:
            agent_state.set_random_state(state["random"])

    def save(self, folder: str | os.PathLike[str], **also: Any) -> None:
        """`agent.save("checkpoint", scheduler=scheduler, epoch=3)`: one file a rank. Collective.

        Call it at the end of the loop's body when `agent.at_boundary` is True. It holds the state,
        and the state_dict (or the plain value) of everything else given.
        """
        if self._inside_step:
            raise UserError(
                "agent.save() in on_round comes before scheduler.step(): call it at the end of the "
                "loop's body, when agent.at_boundary is True"
            )
        agent_state.save(self, Path(folder), also)

    def load(self, folder: str | os.PathLike[str], **also: Any) -> dict[str, Any]:
        """`agent.load("checkpoint", scheduler=scheduler)`: returns the plain values. Collective."""
        return agent_state.load(self, Path(folder), also)

    # -- inside --------------------------------------------------------------------------------

    def exchange(self, x: Tensor) -> Flight:
        self._begin()
        return super().exchange(x)

    def all_reduce(self, x: Tensor) -> Reduction:
        self._begin()
        return super().all_reduce(x)

    def vote(self, values: NDArray[np.float64]) -> Pending:
        self._begin()
        return self.transport.reduce(values)

    def average(self) -> Tensor:
        self.flat.adopt()
        with self._meeting():
            mean = self.transport.snapshot_mean(self.x, self.r)  # no part of what is measured
            return mean.mean(torch.empty_like(self.x))

    def sum_up(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        with self._meeting():
            return self.transport.reduce(values).result()

    def gather(self, text: str) -> list[str]:
        return self.transport.gather_text(text)

    def check_together(self, step: Callable[[], T]) -> T:
        return self._startup.check(step)

    def descend(self, g: Tensor) -> None:
        with self._stepping():
            super().descend(g)

    def local_step(self) -> None:
        with self._stepping():
            super().local_step()

    def _begin(self) -> None:
        if self._notices is not None:
            self._notices.calls += 1

    def _meeting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._notices is None else self._notices.mean()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self.may_step = True
        try:
            yield
        finally:
            self.may_step = False

    @contextmanager
    def _hold(self, block: AbstractContextManager[None]) -> Iterator[None]:
        ours = self.version() == self._version_left
        self._at_mean = True
        try:
            with block:
                yield
        finally:
            self._at_mean = False
            if ours:  # x is what it was, and nobody else has changed it
                self._version_left = self.version()

    def _watch_optimizer(self) -> None:
        watch(self.optimizer, self)
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._hooks.append(self.optimizer.register_step_pre_hook(refuse_alone))

    def _start_from(self, sync: bool | None) -> None:
        if sync is None and self.n > 1:
            sums = self.transport.gather_text(self.flat.checksum())
            if len(set(sums)) > 1 and self.rank == 0:
                warnings.warn(
                    "the ranks have different weights: all start from rank 0's. To keep each "
                    "rank's own give sync=False; to go on from a checkpoint use agent.load() or "
                    "agent.load_state_dict(); sync=True says that rank 0's are meant",
                    stacklevel=4,
                )
        super()._start_from(sync)
