"""An Agent for whoever asks for a torch optimizer: schedulers, GradScaler, training frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ..errors import UserError

if TYPE_CHECKING:
    from .agent import Agent


class AgentOptimizer(torch.optim.Optimizer):
    """Its `step()` is the agent's, its groups and state are those of the agent's optimizer."""

    _step_supports_amp_scaling = True
    """So a GradScaler calls step() on every rank, also on one whose gradient has overflowed."""

    def __init__(self, agent: Agent) -> None:
        _refuse_second_job()
        self.agent = agent
        inner = agent.optimizer
        super().__init__(inner.param_groups, getattr(inner, "defaults", {}))

    # torch's constructor sets both; what they are is the inner optimizer's matter.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.agent.optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        pass

    @property
    def state(self) -> Any:
        return getattr(self.agent.optimizer, "state", {})

    @state.setter
    def state(self, value: Any) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if any(group is param_group for group in self.param_groups):
            return  # torch's constructor adds what is there
        self.agent.optimizer.add_param_group(param_group)  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._unscale()
        self.agent.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.agent.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The agent's whole state, in the form of an optimizer's. Between two rounds.

        It holds this rank's random generators: most frameworks save none.
        """
        state = self.agent.state_dict()
        return {**state.pop("optimizer"), "agent": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective."""
        own = dict(state_dict)
        state = own.pop("agent")
        self.agent.load_state_dict({**state, "optimizer": own})

    def _unscale(self) -> None:
        """What a GradScaler leaves to an optimizer of this kind: to divide, or to drop."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and bool(found_inf):
            self.zero_grad()  # a step without a gradient: a rank must not skip one
        elif scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(inverse.to(p.grad.device))


def _refuse_second_job() -> None:
    """A framework that has joined the ranks itself wraps the model in DDP."""
    if distributed.is_available() and distributed.is_initialized():
        n = distributed.get_world_size()
        if n > 1:
            raise UserError(
                f"torch.distributed runs with {n} processes, so a framework would average their "
                "gradients: call hpc_oldsgd.integrations.start() before the framework is made"
            )
