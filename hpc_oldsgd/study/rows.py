"""A row of a study: an algorithm, options of its own behind a colon, its graph behind an @.

`oldsgd:fragments=tau` is OLDSGD in as many fragments as the round has steps, whatever tau is.
`noloco@one-peer-exponential` talks to other pairs every round, whatever graph the study is on.
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


def algorithm(row: str) -> str:
    """Its name alone."""
    return row.partition("@")[0].partition(":")[0]


def graph(row: str) -> str:
    """Its own graph; empty if it has none."""
    return row.partition("@")[2]


def every() -> list[str]:
    """All algorithms, and those that may send x in fragments once more in tau of them."""
    listed = []
    for name, kind in algorithms.registry().items():
        listed.append(name)
        if issubclass(kind, Fragmented) and make(name, 2) is not None:
            listed.append(name + IN_FRAGMENTS)
    return listed


def _make(row: str, tau: int) -> Algorithm:
    _, _, more = row.partition("@")[0].partition(":")
    kind = algorithms.get(algorithm(row))
    words = [f"--{word}" for word in more.split(",") if word]
    made = [f"--tau={tau}", *(word.replace("=tau", f"={tau}") for word in words)]
    return cli.parse(kind, made)
