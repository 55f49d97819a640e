"""The algorithms by name. This list is the only one; everything else asks it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from ..errors import UserError
from .base import Algorithm, require, state

A = TypeVar("A", bound=type[Algorithm])
_registry: dict[str, type[Algorithm]] = {}
_plugins_loaded = False


def register(name: str) -> Callable[[A], A]:
    """`@register("mine")` above an Algorithm puts it on every command line and in every study."""

    def add(cls: A) -> A:
        known = _registry.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise UserError(f"an algorithm named {name!r} is registered already")
        cls.name = name
        _registry[name] = cls
        return cls

    return add


def names() -> list[str]:
    _load_plugins()
    return list(_registry)


def get(name: str) -> type[Algorithm]:
    _load_plugins()
    if name not in _registry:
        near = difflib.get_close_matches(name, _registry, 1)
        hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(_registry)
        raise UserError(f"there is no algorithm {name!r}; {hint}")
    return _registry[name]


def registry() -> dict[str, type[Algorithm]]:
    _load_plugins()
    return dict(_registry)


def _load_plugins() -> None:
    """Other packages add theirs through the entry point group `hpc_oldsgd.algorithms`."""
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for entry in entry_points(group="hpc_oldsgd.algorithms"):
            entry.load()


from .oldsgd import OLDSGD  # noqa: E402  the files below register themselves
from .dsgd import DSGD, DSGDCTA  # noqa: E402, I001
from .ldsgd import LDSGD  # noqa: E402
from .lsgd import LSGD  # noqa: E402

__all__ = [
    "DSGD",
    "DSGDCTA",
    "LDSGD",
    "LSGD",
    "OLDSGD",
    "Algorithm",
    "get",
    "names",
    "register",
    "registry",
    "require",
    "state",
]
