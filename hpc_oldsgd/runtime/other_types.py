"""Tensors of another type than x, as fp32 norms in a bf16 model: trained by the same algorithm.

Each type has a vector of its own and a copy of the algorithm, whose schedule runs beside x's: small
messages travel with x's. One step of the optimizer changes all of them, so this fits the algorithms
that hand it the gradient as it is (`reads_gradient = False`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..algorithms import Algorithm
from ..errors import UserError
from ..transport.base import Flight, Reduction, Wire, cut
from .flat import Buffers, Flat, Slot
from .running_statistics import running_statistics
from .unread_gradient import UNREAD

if TYPE_CHECKING:
    from .agent_runner import AgentRunner
    from .runner import Schedule


class Beside:
    """What a schedule sees of an agent, with x of another type.

    A schedule lasts one round and is made anew for the next, as it is when a run is resumed:
    between the two the agent's own round ends.
    """

    def __init__(self, flat: Flat, agent: AgentRunner) -> None:
        self.flat, self.x, self._agent = flat, flat.x, agent
        self.algorithm = copy.deepcopy(agent.algorithm)
        if hasattr(self.algorithm, "fragments"):  # too small to be cut
            self.algorithm.fragments = 1
        self.distance: Tensor | float = 0.0
        self._tail = running_statistics([flat])
        self._schedule: Schedule | None = None

    # -- what an algorithm calls ---------------------------------------------------------------

    @property
    def alpha(self) -> float:
        return self._agent.alpha

    @property
    def n(self) -> int:
        return self._agent.n

    def descend(self, g: Tensor) -> None:
        """The agent's optimizer has stepped, on all types."""
        increment_version(self.x)

    def exchange(self, x: Tensor) -> Flight:
        with self._own_tail():
            return self._agent.transport.exchange(x, self._agent.r)

    def cut(self, x: Tensor, fragments: int) -> list[Tensor]:
        return cut(x, fragments)

    def all_reduce(self, x: Tensor) -> Reduction:
        return self._agent.transport.all_reduce(x, self._agent.r)

    def rounds(self) -> Iterator[int]:
        yield self._agent.r

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.x)

    # -- what the agent calls ------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """At the top of a round."""
        self._schedule = self.algorithm.schedule(self)  # type: ignore[arg-type]
        next(self._schedule)

    def advance(self) -> None:
        """After the optimizer's step; the last of a round mixes."""
        assert self._schedule is not None
        transport = self._agent.transport
        of_x, transport.distance = transport.distance, None
        try:
            self._schedule.send(UNREAD)
        except StopIteration:
            self._schedule = None
        if transport.distance is not None:
            self.distance = transport.distance
        transport.distance = of_x

    def drop(self) -> None:
        if self._schedule is not None:
            self._schedule.close()
            self._schedule = None

    @contextmanager
    def _own_tail(self) -> Iterator[None]:
        transport = self._agent.transport
        of_x, transport.tail = transport.tail, self._tail
        yield
        transport.tail = of_x


class OtherTypes:
    def __init__(self, flats: list[Flat]) -> None:
        self.flats = flats
        self.each: list[Beside] = []

    @property
    def slots(self) -> list[Slot]:
        return [slot for flat in self.flats for slot in flat.slots]

    @property
    def distance(self) -> float:
        return sum(float(one.distance) for one in self.each)

    def attach(self, agent: AgentRunner) -> None:
        self.each = [Beside(flat, agent) for flat in self.flats]

    def begin(self) -> None:
        for one in self.each:
            one.begin()

    def advance(self) -> None:
        for one in self.each:
            one.advance()

    def drop(self) -> None:
        for one in self.each:
            one.drop()

    def state_dict(self) -> dict[str, Any]:
        """Of the algorithm; the values are the model's."""
        return {str(one.x.dtype): one.algorithm.state_dict() for one in self.each}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one in self.each:
            one.algorithm.load_state_dict(state.get(str(one.x.dtype), {}), like=one.x)

    def check(self, algorithm: Algorithm, wire: Wire, own: Flat) -> None:
        for flat in self.flats:
            first = flat.slots[0]
            if algorithm.reads_gradient:
                raise UserError(
                    f"{first.name} is {flat.dtype}, {own.slots[0].name} is {own.dtype}: this "
                    "algorithm needs the gradient as one vector of one dtype. Cast the model, for "
                    f"instance by model.to({own.dtype}), or use OLDSGD in its delta form"
                )
            if not isinstance(wire, torch.dtype):
                continue
            if wire != flat.dtype and wire.itemsize >= flat.dtype.itemsize:
                raise UserError(
                    f"{first.name} is {flat.dtype}, which does not fit the wire type {wire}: leave "
                    "wire out"
                )


def flatten(
    module: torch.nn.Module, buffers: Buffers, types: list[torch.dtype]
) -> tuple[Flat, OtherTypes]:
    """x of the first type, and the others."""
    flats = [Flat(module, buffers, dtype=dtype) for dtype in types]
    devices = {flat.device for flat in flats}
    if len(devices) > 1:
        raise UserError(f"the model is on several devices ({devices}): move it to one")
    return flats[0], OtherTypes(flats[1:])
