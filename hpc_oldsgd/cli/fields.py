"""A dataclass as command-line options: its fields, flags and help texts, for argparse.

A field is a bool, int, float, str, Path, Literal or another class that is made from one word; one
of these or None; or a tuple[T, ...] of these. The docstring under a field is its help text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import math
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from ..errors import UserError

T = TypeVar("T")
Positional = Annotated[T, "positional"]
"""A field of type Positional[str] is given by its place, without a name."""
NOT_GIVEN = object()


def options(config: type) -> list[dataclasses.Field[Any]]:
    """The fields a user may set: no init=False, no leading _, no metadata {"cli": False}."""
    shown = (f for f in dataclasses.fields(config) if f.init and f.metadata.get("cli", True))
    return [f for f in shown if not f.name.startswith("_")]


def written(config: type) -> dict[str, str]:
    """Field name -> --name, or NAME of one that is given by its place."""
    hints = typing.get_type_hints(config, include_extras=True)
    places = [f.name for f in options(config) if hasattr(hints[f.name], "__metadata__")]
    return {
        f.name: f.name.upper() if f.name in places else f"--{dashed(f.name)}"
        for f in options(config)
    }


def flags(config: type) -> set[str]:
    """What can be written on the command line: --name, and --no-name of a truth value."""
    hints = typing.get_type_hints(config)
    named = {name: word for name, word in written(config).items() if word.startswith("--")}
    return {*named.values(), *(f"--no-{w[2:]}" for n, w in named.items() if hints[n] is bool)}


def add_options(add: Callable[..., Any], config: type, notes: Mapping[str, str]) -> None:
    """Call `add`, an add_argument, for each field. Only what the user gives is in the result.

    `notes` add to help texts, by name.
    """
    hints, docs, names = typing.get_type_hints(config), field_docs(config), written(config)
    for field in options(config):
        name, word = field.name, names[field.name]
        parts = docs.get(name), notes.get(name), _shown(default_of(field))
        more = _argument(hints[name], word)
        if word.startswith("--"):
            argument = add(word, dest=name, default=argparse.SUPPRESS, **more)
        else:  # argparse would read SUPPRESS as a word
            more |= {} if more["nargs"] else {"nargs": "?", "default": NOT_GIVEN}
            argument = add(name, **more | {"metavar": word})
        argument.help = " ".join(filter(None, parts)).replace("%", "%%")


def _argument(hint: Any, name: str) -> dict[str, Any]:
    several = typing.get_origin(hint) is tuple
    kind = typing.get_args(hint)[0] if several else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    optional = type(None) in typing.get_args(kind)
    if optional:
        (kind,) = (k for k in typing.get_args(kind) if k is not type(None))
    make, word = kind, getattr(kind, "__name__", "").upper()
    if typing.get_origin(kind) is Literal:
        known = {str(value): value for value in typing.get_args(kind)}
        make, word = known.__getitem__, f"{{{','.join(known)}}}"
    takes = f"{name} [{word} ...]" if several else f"{name} {word}"

    def read(text: str) -> Any:
        try:
            return None if optional and text == "None" else make(text)
        except (ValueError, KeyError, TypeError):
            said = f"Cannot read {name} {text}: the option is {takes}."
            raise argparse.ArgumentTypeError(said) from None

    return {"type": read, "metavar": word, "nargs": "*" if several else None}


def default_of(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _shown(default: Any) -> str:
    """Nothing where the help text itself has to say what happens."""
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = " ".join(map(str, default))
    return "" if default in (None, dataclasses.MISSING, "") else f"(default: {default})"


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


def at_least(least: float, config: object, *names: str) -> None:
    """Refuse a number below `least`, infinite or NaN. A field may have several, or None."""
    for name, number in _numbers(config, names):
        if not least <= number < math.inf:
            raise UserError(f"--{dashed(name)} must be at least {least:g}, not {number:g}")


def positive(config: object, *names: str) -> None:
    for name, number in _numbers(config, names):
        if not 0 < number < math.inf:
            raise UserError(f"--{dashed(name)} must be positive, not {number:g}")


def _numbers(config: object, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name in names:
        value = getattr(config, name, None)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                yield name, number


def dashed(name: str) -> str:
    return name.replace("_", "-")
