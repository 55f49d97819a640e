"""What an Agent is given: the right things, or one sentence that says what to give."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import topology as topologies
from ..algorithms import Algorithm, get, registry
from ..errors import UserError, nearest
from ..topology import Topology
from .flat import Flat
from .sgd import Optimizer

if TYPE_CHECKING:
    from .agent import Agent


def an_algorithm(given: Any) -> Algorithm:
    if isinstance(given, str):
        return get(given)()
    if isinstance(given, type) and issubclass(given, Algorithm):
        raise UserError(f"{given.__name__} is a class: pass {given.__name__}()")
    if not isinstance(given, Algorithm):
        raise UserError(f"algorithm is a name or an Algorithm, not {type(given).__name__}")
    return given


def a_topology(given: Any, n: int) -> Topology:
    if isinstance(given, str):
        return topologies.from_name(given, n)
    if not isinstance(given, Topology):
        raise UserError(f"topology is a name or a Topology, not {type(given).__name__}")
    return given


def check_options(options: dict[str, Any], algorithm: Algorithm, transport: type) -> None:
    """The keywords of an Agent that are not its own belong to the transport."""
    known = list(inspect.signature(transport).parameters)[2:]  # after comm and topology
    for name, value in options.items():
        if name in known:
            continue
        if name in ("auto", "plan"):
            raise UserError(
                f"Agent has no option {name!r}: hpc_oldsgd.make_plan(model, gradient) measures and "
                "chooses graph, wire, tau and fragments for it (docs/plan.md)"
            )
        own = type(algorithm)
        every = [own, *(cls for cls in registry().values() if cls is not own)]
        cls = next((c for c in every if name in {f.name for f in fields(c) if f.init}), None)
        if cls is not None:
            raise UserError(
                f"Agent has no option {name!r}, it is the algorithm's: "
                f"algorithm={cls.__name__}({name}={value!r})"
            )
        close = nearest(name, [*known, "buffers", "sync"])
        hint = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
        raise UserError(f"Agent has no option {name!r}; {hint}")


def check_optimizer(optimizer: Optimizer, flat: Flat) -> None:
    """It steps without a closure, and trains exactly what is mixed."""
    step = inspect.signature(type(optimizer).step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise UserError(
            f"{type(optimizer).__name__} calls the loss itself, several times a step: use an "
            "optimizer whose step() needs no closure"
        )
    check_trained(optimizer, flat)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for slot in flat.parameters:
        if id(slot.tensor) not in known:
            raise UserError(
                f"{slot.name} requires a gradient but is not in the optimizer: add it, "
                "or freeze it with requires_grad_(False)"
            )


def check_trained(optimizer: Optimizer, flat: Flat) -> None:
    """A learnable loss, for instance, would be trained by each rank for itself."""
    inside = {id(parameter) for parameter in flat.module.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and id(p) not in inside:
                raise UserError(
                    f"the optimizer trains a tensor {tuple(p.shape)} that is not in the model, so "
                    "it would not be mixed: make it a part of the model, as in "
                    "nn.ModuleList([model, loss]), or give it an optimizer of its own"
                )


_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Agent]] = weakref.WeakKeyDictionary()
"""Which Agent an optimizer belongs to: the last one that was made with it."""


def watch(optimizer: Optimizer, agent: Agent) -> None:
    _owners[optimizer] = weakref.ref(agent)


def refuse_alone(optimizer: Any, *_: Any) -> None:
    """A step of the optimizer alone would train this rank and mix nothing."""
    owner = _owners.get(optimizer)
    agent = None if owner is None else owner()
    if agent is not None and not agent.may_step and not agent.finished:
        raise UserError(
            "call agent.step() in place of optimizer.step(), which would mix nothing; with a "
            "GradScaler or a framework use agent.as_optimizer()"
        )


class LeftMemory:
    """Memory that parameters have left. Who writes there trains what nobody reads."""

    def __init__(self, before: list[Tensor]) -> None:
        some = sorted(before, key=Tensor.numel)[:8]  # the smallest: they are kept for one step
        self._watched = [(old, old.clone()) for old in some]

    def check(self, optimizer: Optimizer) -> None:
        """After its first step; later calls cost nothing."""
        for old, was in self._watched:
            if not torch.equal(old, was):
                raise _keeps_memory(optimizer)
        self._watched = []


def _keeps_memory(optimizer: Optimizer) -> UserError:
    return UserError(
        f"{type(optimizer).__name__} keeps a part of a parameter's memory, which the Agent moves: "
        "use an optimizer that reads p at every step"
    )


@contextlib.contextmanager
def followed(model: nn.Module, optimizer: Optimizer) -> Iterator[LeftMemory]:
    """Parameters may move to other memory in here: tensors that the optimizer keeps follow them.

    Some optimizers keep `p.data` from when they were made. They would train memory nobody reads.
    """
    before = [(parameter, parameter.detach()) for parameter in model.parameters()]
    yield LeftMemory([old for parameter, old in before if parameter.requires_grad])
    moved = {old.data_ptr(): (p, old) for p, old in before if old.data_ptr() != p.data_ptr()}
    for held in _tensors(optimizer, set()):
        found = moved.get(held.data_ptr())
        if found is None or not held.numel():
            continue
        parameter, old = found
        if (held.shape, held.stride(), held.dtype) != (old.shape, old.stride(), old.dtype):
            raise _keeps_memory(optimizer)
        held.data = parameter.data


def _tensors(thing: Any, seen: set[int], depth: int = 6) -> Iterator[Tensor]:
    """In its attributes, in theirs, and in lists and dictionaries of such."""
    if isinstance(thing, Tensor):
        if thing.layout is torch.strided:
            yield thing
        return
    if not isinstance(thing, (dict, list, tuple)):
        thing = None if isinstance(thing, ModuleType) else getattr(thing, "__dict__", None)
        if not isinstance(thing, dict):  # a class has another kind
            return
    if depth and id(thing) not in seen:
        seen.add(id(thing))
        for one in list(thing.values() if isinstance(thing, dict) else thing):
            yield from _tensors(one, seen, depth - 1)
