"""A row of a study: an algorithm, and options of its own behind a colon.

`oldsgd:fragments=tau` is OLDSGD in as many fragments as the round has steps, whatever tau is.
"""

from __future__ import annotations

from .. import algorithms, cli
from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..errors import UserError

IN_FRAGMENTS = ":fragments=tau"


def make(row: str, tau: int) -> Algorithm | None:
    """None where the algorithm, or an option, takes another number of steps a round."""
    try:
        return _make(row, tau)
    except UserError:
        check(row)
        return None


def check(row: str) -> None:
    """Raises UserError where the row fits no tau, small or large."""
    try:
        _make(row, 1)
    except UserError:
        _make(row, 10**6)


def every() -> list[str]:
    """All algorithms, and those that may send x in fragments once more in tau of them."""
    listed = []
    for name, kind in algorithms.registry().items():
        listed.append(name)
        if issubclass(kind, Fragmented) and make(name, 2) is not None:
            listed.append(name + IN_FRAGMENTS)
    return listed


def _make(row: str, tau: int) -> Algorithm:
    name, _, more = row.partition(":")
    kind = algorithms.get(name)
    words = [f"--{word}" for word in more.split(",") if word]
    made = [f"--tau={tau}", *(word.replace("=tau", f"={tau}") for word in words)]
    return cli.parse(kind, made)
