"""All n agents in one process: the simulator's counterpart of Agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms import Algorithm
from ..errors import UserError
from ..runtime.flat import Buffers, Flat
from ..runtime.runner import Runner
from ..runtime.running_statistics import running_statistics
from ..runtime.sgd import Optimizer, one_alpha
from ..runtime.unread_gradient import UNREAD
from ..runtime.wire import check_form, check_wire
from ..transport.narrow import Narrow, check_memory
from .stacked import StackedTransport


class Swarm(Runner):
    """n models and their optimizers; row i of x is agent i's model."""

    transport: StackedTransport

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        transport: StackedTransport,
        *,
        buffers: Buffers = "mix",
    ) -> None:
        if not len(models) == len(optimizers) == transport.n:
            raise UserError(f"{transport.n} agents need as many models and optimizers")
        flats = [Flat(model, buffers) for model in models]
        first = flats[0]
        check_wire(algorithm, transport.wire, first.dtype)
        X = torch.empty(transport.n, first.d, dtype=first.dtype, device=first.device)
        if isinstance(transport.wire, Narrow):
            check_memory(transport.wire, X, algorithm.exchanged, transport.topology, -1, 1)
        G = torch.zeros_like(X) if algorithm.reads_gradient else None
        for i, flat in enumerate(flats):
            X[i] = flat.x
            flats[i] = Flat(models[i], buffers, X[i], None if G is None else G[i])
            check_form(algorithm, optimizers[i], flats[i])
        super().__init__(X, algorithm, transport, tail=running_statistics(flats))
        self.models, self.optimizers, self.flats = list(models), list(optimizers), flats
        self.flat = flats[0]  # all are laid out alike
        self._g = UNREAD if G is None else G

    @property
    def alpha(self) -> float:
        return one_alpha(self.optimizers[0])

    def step(self) -> bool:
        """After every model's backward pass."""
        for flat in self.flats:
            flat.adopt()
            if self.algorithm.reads_gradient:
                flat.gradient()
        return self.advance(self._g)

    def descend(self, g: Tensor) -> None:
        if g is not self._g:
            for flat, own in zip(self.flats, g, strict=True):
                flat.gradient().copy_(own)
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "clock": self.transport.clock.state_dict(),
            "transport": self.transport.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.transport.drain()
        self.transport.clock.load_state_dict(state["clock"])
        self.transport.load_state_dict(state.get("transport", {}))
        super().load_state_dict(state)
