"""Dataclasses by name: the one list that command lines, tests, docs and studies ask.

Other packages add theirs by the decorator, or through an entry point group, which is read on the
first look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import UserError, unknown

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)


class Registry(Generic[T]):
    def __init__(self, what: str, group: str) -> None:
        """`what` is the word for one of them in messages, `group` their entry point group."""
        self.what, self.group = what, group
        self._known: dict[str, type[T]] = {}
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[Kind], Kind]:
        """`@register("mine")` above a dataclass: on every command line, in every study."""

        def add(cls: Kind) -> Kind:
            known = self._known.get(name)
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise UserError(f"the {self.what} {name!r} is registered already")
            if "__dataclass_fields__" not in vars(cls):
                raise UserError(f"{cls.__name__} needs @dataclass between @register and the class")
            cls.name = name  # type: ignore[attr-defined]
            self._known[name] = cls
            return cls

        return add

    def registry(self) -> dict[str, type[T]]:
        """Ours in the order of their list, then those of other packages."""
        self._load_plugins()
        return dict(self._known)

    def names(self) -> list[str]:
        return list(self.registry())

    def get(self, name: str) -> type[T]:
        known = self.registry()
        if name not in known:
            raise unknown(self.what, name, known)
        return known[name]

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for entry in entry_points(group=self.group):
            try:
                entry.load()
            except Exception as error:
                raise UserError(
                    f"the {self.what} {entry.name!r} of another package ({entry.value}) does not "
                    f"load: {type(error).__name__}: {error}"
                ) from error
