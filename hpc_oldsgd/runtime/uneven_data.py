"""Batches of ranks whose data differ in length: all take the same number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from ..errors import UserError

if TYPE_CHECKING:
    from ..transport.base import Pending
    from .agent import Agent

Batch = TypeVar("Batch")
Until = Literal["shortest", "longest"]


def batches(agent: Agent, loader: Iterable[Batch], until: Until) -> Iterator[Batch]:
    if until not in ("shortest", "longest"):
        raise UserError(f'until is "shortest" or "longest", not {until!r}')
    least = _least_length(agent, loader)
    if until == "shortest" and least < math.inf:
        for _, batch in zip(range(int(least)), loader, strict=False):
            yield batch
        return
    source, out, vote, voted_at = iter(loader), False, None, -1
    while True:
        if agent.at_boundary and agent.t != voted_at:
            # Counted a round later, when it has long arrived: nobody waits for a vote.
            if vote is not None and _ends(vote, agent.n, until):
                return
            vote, voted_at = agent.vote(np.array([float(out)])), agent.t
        if not out:
            try:
                batch = next(source)
            except StopIteration:
                out = True
                continue
            yield batch
        else:  # without a gradient: it goes on mixing with those who have data
            agent.optimizer.zero_grad()
            agent.step()


def _ends(vote: Pending, n: int, until: Until) -> bool:
    out = int(vote.result()[0])
    return out == n if until == "longest" else out > 0


def _least_length(agent: Agent, loader: Iterable[object]) -> float:
    """Of all ranks' loaders; infinite if one of them does not know its length. Collective."""
    try:
        length: float = len(loader)  # type: ignore[arg-type]
    except TypeError:  # an IterableDataset, a generator
        length = math.inf
    lengths = [float(text) for text in agent.gather(str(length))]
    return math.inf if math.inf in lengths else min(lengths)
