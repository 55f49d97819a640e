"""A dataclass as command-line options: its fields, flags and help texts, in the form tyro reads."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import tyro


def options(config: type) -> list[dataclasses.Field[Any]]:
    """The fields a user may set: no init=False, no leading _, no metadata {"cli": False}."""
    shown = (f for f in dataclasses.fields(config) if f.init and f.metadata.get("cli", True))
    return [f for f in shown if not f.name.startswith("_")]


def flags(config: type) -> set[str]:
    """What can be written on the command line: --name, and --no-name of a truth value."""
    hints = typing.get_type_hints(config, include_extras=True)
    names = [f.name for f in options(config) if not _positional(hints[f.name])]
    no = {f"--no-{dashed(name)}" for name in names if hints[name] is bool}
    return no.union(f"--{dashed(name)}" for name in names)


def shadow(config: type, defaults: Mapping[str, Any], notes: Mapping[str, str]) -> type:
    """The fields of `config` without its methods: tyro parses, and `config` itself checks later.

    `defaults` replaces defaults, `notes` adds to help texts, both by field name.
    """
    hints = typing.get_type_hints(config, include_extras=True)
    docs = field_docs(config)
    fields: list[Any] = []
    for field in options(config):
        hint = hints[field.name]
        text = " ".join(filter(None, [docs.get(field.name), notes.get(field.name)]))
        if text:
            hint = Annotated[hint, tyro.conf.arg(help=text)]
        if _positional(hint):
            hint = Annotated[hint, tyro.conf.arg(metavar=field.name.upper())]
        copy: Any
        if field.name in defaults:
            copy = dataclasses.field(default_factory=functools.partial(defaults.get, field.name))
        elif field.default_factory is not dataclasses.MISSING:
            copy = dataclasses.field(default_factory=field.default_factory)
        else:
            copy = dataclasses.field(default=field.default)
        fields.append((field.name, hint, copy))
    made = dataclasses.make_dataclass(config.__name__, fields, kw_only=True)
    made.__doc__ = summary(config)
    return made


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Field name -> the docstring under it, inherited fields included."""
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for statement, below in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[statement.target.id] = " ".join(below.value.value.split())
    return docs


def summary(config: type) -> str:
    """The first paragraph of a class's docstring, not the signature that dataclasses write."""
    text = inspect.cleandoc(config.__doc__ or "")
    generated = text.startswith(f"{config.__name__}(")
    return "" if generated else " ".join(text.partition("\n\n")[0].split())


def _positional(hint: Any) -> bool:
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def dashed(name: str) -> str:
    return name.replace("_", "-")
