"""Which types may travel, and which optimizers and models fit the form of an algorithm."""

from __future__ import annotations

import torch

from ..algorithms import Algorithm
from ..errors import UserError
from ..transport.base import Wire
from ..transport.narrow import Narrow
from .flat import Flat
from .sgd import SGD, Optimizer

WIRES: dict[str | None, Wire] = {
    None: None,
    "same": None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": Narrow(8),
    "int4": Narrow(4),
}


def check_form(algorithm: Algorithm, optimizer: Optimizer, flat: Flat) -> None:
    """Who rebuilds x from what was sent less the gradients loses every other change of x."""
    if not algorithm.rebuilds_x:
        return
    groups = optimizer.param_groups
    plain = type(optimizer) in (torch.optim.SGD, SGD) and not any(
        group.get(key) for group in groups for key in ("momentum", "weight_decay", "maximize")
    )
    if not plain or len({group["lr"] for group in groups}) > 1:
        raise UserError(
            'form="gradient" is the paper\'s literal update, for torch.optim.SGD without '
            'momentum or weight decay: use form="delta" with this optimizer'
        )
    if len(flat.parameters) < len(flat.slots):
        raise UserError(
            'form="gradient" would lose what BatchNorm has counted in a round: use '
            'buffers="local" or form="delta" with this model'
        )


def check_wire(algorithm: Algorithm, wire: Wire, model: torch.dtype) -> None:
    if algorithm.rebuilds_x and wire not in (None, model):
        raise UserError(
            'form="gradient" replaces the model by what was sent, and a narrower wire rounds that: '
            'use form="delta", which keeps the mean'
        )


def check_name(wire: str) -> None:
    if wire not in WIRES:
        known = "same, fp32, bf16, fp16, fp64, int8, int4"
        raise UserError(f"there is no wire type {wire!r}; known: {known}")


def wire_type(wire: Wire | str, model: torch.dtype) -> Wire:
    if isinstance(wire, str):
        check_name(wire)
    chosen = WIRES[wire] if wire is None or isinstance(wire, str) else wire
    if not isinstance(chosen, torch.dtype):
        return chosen
    if chosen != model and chosen.itemsize >= model.itemsize:
        raise UserError(f"the wire type {chosen} is not narrower than the model's {model}")
    return chosen
