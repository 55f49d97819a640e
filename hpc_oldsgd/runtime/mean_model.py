"""The mean of all agents' models: as x, as a state_dict, and in the model for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError
from .flat import Flat

if TYPE_CHECKING:
    from .agent import Agent


class LaidOutLikeX(Tensor):
    """A vector with gaps between the tensors of the model, as x has them.

    torch's vector_to_parameters cuts a vector into slices without gaps and would give wrong
    weights, so a slice of this one is refused. Whatever torch makes of it is a plain tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], slice):
            raise UserError(
                "agent.mean() is laid out like agent.x, with gaps between the tensors: use "
                "agent.mean_state_dict(), or agent.x.copy_(agent.mean())"
            )
        plain = [a.as_subclass(Tensor) if isinstance(a, cls) else a for a in args]
        return Tensor.__torch_function__(func, (), plain, kwargs or {})


def like_x(mean: Tensor, flat: Flat) -> Tensor:
    """Where x has no gaps, a plain tensor."""
    padded = flat.d != sum(slot.tensor.numel() for slot in flat.slots)
    return mean.as_subclass(LaidOutLikeX) if padded else mean


def mean_outside(agent: Agent) -> dict[int, Tensor]:
    """By id: float buffers that are not in x (buffers="local"), and tensors of other types.

    Averaged. Collective.
    """
    others = {id(slot.tensor) for slot in agent.others.slots}
    outside = [t for _, t in agent.flat.outside()]
    local = [t for t in outside if id(t) in others or _is_local(t, agent.flat)]
    if not local:
        return {}
    sums = agent.sum_up(np.concatenate([t.detach().double().cpu().numpy().ravel() for t in local]))
    means = torch.from_numpy(sums / agent.n).split([t.numel() for t in local])
    return {id(t): m.view(t.shape).to(t) for t, m in zip(local, means, strict=True)}


def _is_local(tensor: Tensor, flat: Flat) -> bool:
    frozen = isinstance(tensor, nn.Parameter)
    return tensor.is_floating_point() and not frozen and id(tensor) not in flat.power_vectors


def mean_state_dict(agent: Agent) -> dict[str, Tensor]:
    x, outside = agent.average(), mean_outside(agent)
    slots = {id(slot.tensor): slot for slot in agent.flat.slots}
    state: dict[str, Tensor] = {}
    for key, tensor in agent.model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            state[key] = tensor  # a module's extra state
            continue
        slot = slots.get(id(tensor))
        found = outside.get(id(tensor), tensor) if slot is None else slot.view(x)
        state[key] = found.detach().clone(memory_format=torch.contiguous_format)
    return state


@contextlib.contextmanager
def mean_weights(agent: Agent) -> Iterator[None]:
    x, outside = agent.average(), mean_outside(agent)
    tensors = [t for _, t in agent.flat.outside() if id(t) in outside]
    before, kept = agent.x.clone(), [t.detach().clone() for t in tensors]
    with torch.no_grad():
        agent.x.copy_(x)
        for tensor in tensors:
            tensor.copy_(outside[id(tensor)])
    try:
        yield
    finally:
        agent.flat.adopt()
        with torch.no_grad():
            agent.x.copy_(before)
            for tensor, own in zip(tensors, kept, strict=True):
                tensor.copy_(own)
