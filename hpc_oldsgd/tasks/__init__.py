"""The tasks by name. This list is the only one; everything else asks it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from ..data import seed_model, seed_step
from ..errors import UserError
from .base import OnDisk, Task

T = TypeVar("T", bound=type[Task])
_registry: dict[str, type[Task]] = {}
_plugins_loaded = False


def register(name: str) -> Callable[[T], T]:
    """`@register("mine")` above a Task puts it on every command line."""

    def add(cls: T) -> T:
        known = _registry.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise UserError(f"a task named {name!r} is registered already")
        cls.name = name
        _registry[name] = cls
        return cls

    return add


def names() -> list[str]:
    _load_plugins()
    return list(_registry)


def get(name: str) -> type[Task]:
    _load_plugins()
    if name not in _registry:
        near = difflib.get_close_matches(name, _registry, 1)
        hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(_registry)
        raise UserError(f"there is no task {name!r}; {hint}")
    return _registry[name]


def registry() -> dict[str, type[Task]]:
    _load_plugins()
    return dict(_registry)


def _load_plugins() -> None:
    """Other packages add theirs through the entry point group `hpc_oldsgd.tasks`."""
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for entry in entry_points(group="hpc_oldsgd.tasks"):
            entry.load()


from .digits import Digits, Logistic  # noqa: E402, I001  the files below register themselves
from .cifar10 import Cifar10ResNet18, Cifar10VGG11  # noqa: E402
from .wikitext2 import WikiText2GPT2  # noqa: E402

__all__ = [
    "Cifar10ResNet18",
    "Cifar10VGG11",
    "Digits",
    "Logistic",
    "OnDisk",
    "Task",
    "WikiText2GPT2",
    "get",
    "names",
    "register",
    "registry",
    "seed_model",
    "seed_step",
]
