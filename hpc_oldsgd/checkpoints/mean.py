"""The mean model of a checkpoint as a plain state_dict.

It is summed over the agents in the order of the run's own average, so it is the very model that
the run measured; a few buffers of one model at a time are in memory, however many agents there are.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import UserError
from ..runtime.flat import Flat
from ..transport.base import ring_chunks, ring_mean
from .store import Checkpoint


def layout(model: nn.Module, flat: Flat) -> dict[str, Any]:
    """Where a checkpoint holds each entry of the model's state_dict: in x, or by name outside."""
    inside = {id(slot.tensor): slot for slot in flat.slots}
    outside = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    places: dict[str, Any] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        slot = inside.get(id(tensor))
        if slot is None:
            places[key] = outside[id(tensor)]
        else:
            shape, stride = list(slot.tensor.shape), list(slot.tensor.stride())
            places[key] = {"offset": slot.offset, "shape": shape, "stride": stride}
    return places


class Shards:
    """The agents' parts of a checkpoint, read as they are asked for."""

    def __init__(self, found: Checkpoint, stack: contextlib.ExitStack) -> None:
        self.n = int(found.manifest["run"]["agents"])
        self.stacked = found.manifest["run"]["kind"] == "simulate"  # all agents in one file
        paths = [found.path(k) for k in range(found.count)]
        self.files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        self._x = [file.get_slice("runner.x") for file in self.files]
        self.d = int(self._x[0].get_shape()[-1])
        self.names = set(self.files[0].keys())

    def x(self, i: int, a: int, b: int) -> Tensor:
        part: Tensor = self._x[0][i : i + 1, a:b][0] if self.stacked else self._x[i][a:b]
        return part

    def outside(self, i: int, name: str) -> Tensor:
        file, at = (self.files[0], i) if self.stacked else (self.files[i], 0)
        tensor: Tensor = file.get_tensor(f"models.{at}.{name}")
        return tensor


def mean_state_dict(found: Checkpoint) -> dict[str, Tensor]:
    """The mean of x as a state_dict; what is outside x is averaged if float, else agent 0's."""
    try:
        return _mean_state_dict(found)
    except (SafetensorError, RuntimeError, LookupError) as error:
        why = " ".join(str(error).split())[:100]
        raise UserError(f"{found.folder} does not hold the model it names ({why})") from None


def _mean_state_dict(found: Checkpoint) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        shards = Shards(found, stack)
        xbar = mean_x(shards)
        for key, place in found.manifest["layout"].items():
            if isinstance(place, dict):
                view = xbar.as_strided(place["shape"], place["stride"], place["offset"])
                state[key] = view.clone(memory_format=torch.contiguous_format)
            elif f"frozen.{place}" in shards.names:
                state[key] = shards.files[0].get_tensor(f"frozen.{place}")
            else:
                state[key] = shards.outside(0, place)
                if state[key].is_floating_point():
                    each = [shards.outside(i, place).double() for i in range(shards.n)]
                    state[key] = torch.stack(each).mean(0).to(state[key].dtype)
    return state


def mean_x(shards: Shards) -> Tensor:
    """The mean of x, in its own type."""
    n, chunks = shards.n, ring_chunks(shards.d, shards.n)

    def nth(step: int) -> Tensor:
        return torch.cat([shards.x((k + step) % n, a, b) for k, (a, b) in enumerate(chunks)])

    return ring_mean(nth, n).to(shards.x(0, 0, 1).dtype)
