"""Algorithms whose x travels in fragments, one after the other, under the local steps of a round.

Fragment k of P leaves after step floor(k tau / P) of the round and is mixed after step
floor((k+1) tau / P):

    x_i[k] <- x_i[k] + sum_j w_ij (y_j[k] - y_i[k]),     y[k] the snapshot of fragment k

One fragment is in the air at a time and a round sends the same bytes, so it takes max(tau, c) as
before. What is mixed is tau / P steps old instead of tau. P = 1 sends x whole.

The pass that mixes fragment k does not write the snapshot of fragment k + 1, which is other memory:
it would have to read it all the same. So the exchange copies it, 1 / P of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import Self

from .base import Algorithm, require

if TYPE_CHECKING:
    from ..runtime.runner import Runner


@dataclass
class Fragmented(Algorithm):
    """Base of those that may send x in fragments."""

    fragments: int = 1
    """Parts in which x travels, one after the other, from 1 to tau: more parts bring fresher
    models in the same time. 1 is the paper's method; auto takes as many as cost no time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            int(self.fragments) == self.fragments and 1 <= self.fragments <= self.tau,
            f"fragments must be a whole number from 1 to tau, which is {self.tau}, not "
            f"{self.fragments}",
        )

    @property
    def P(self) -> int:
        return min(self.fragments, self.tau)  # --retune may have made tau smaller

    def with_tau(self, tau: int) -> Self:
        return replace(self, tau=tau, fragments=min(self.fragments, tau))

    def flights(self, agent: Runner, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Of one round: the local steps under each flight, and the tensors' parts it is about."""
        tau, P = self.tau, self.P
        parts = zip(*(agent.cut(tensor, P) for tensor in tensors), strict=True)
        for k, each in enumerate(parts):
            yield (k + 1) * tau // P - k * tau // P, each
