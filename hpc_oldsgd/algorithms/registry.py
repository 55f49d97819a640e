"""Algorithms by name: what the command lines, the tests, the docs and the studies ask."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from ..errors import UserError
from .base import Algorithm

A = TypeVar("A", bound=type[Algorithm])
GROUP = "hpc_oldsgd.algorithms"
_registry: dict[str, type[Algorithm]] = {}
_plugins_loaded = False


def register(name: str) -> Callable[[A], A]:
    """`@register("mine")` above an Algorithm puts it on every command line and in every study."""

    def add(cls: A) -> A:
        known = _registry.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise UserError(f"an algorithm named {name!r} is registered already")
        if "__dataclass_fields__" not in vars(cls):
            raise UserError(f"{cls.__name__} needs @dataclass between @register and the class")
        cls.name = name
        _registry[name] = cls
        return cls

    return add


def names() -> list[str]:
    return list(registry())


def get(name: str) -> type[Algorithm]:
    known = registry()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(known)
        raise UserError(f"there is no algorithm {name!r}; {hint}")
    return known[name]


def registry() -> dict[str, type[Algorithm]]:
    """Ours in the order of the paper's table, then those of other packages."""
    _load_plugins()
    return dict(_registry)


def _load_plugins() -> None:
    """Other packages add theirs through the entry point group `hpc_oldsgd.algorithms`."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise UserError(
                f"the algorithm {entry.name!r} of another package ({entry.value}) does not load: "
                f"{type(error).__name__}: {error}"
            ) from error
