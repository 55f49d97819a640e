"""DSGD, decentralized SGD with one gradient a round, in its two orders.

Adapt then combine (blocking): x_i <- sum_j w_ij (x_j - alpha g_j); LDSGD with tau = 1.
Combine then adapt (overlapped): x_i <- sum_j w_ij x_j - alpha g_i; OLDSGD with tau = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import require
from .ldsgd import LDSGD
from .oldsgd import OLDSGD
from .registry import register

ONE_STEP = "{} takes one local step a round: tau must be 1 (for more, use {})"


@register("dsgd")
@dataclass
class DSGD(LDSGD):
    """Decentralized SGD, adapt then combine, blocking: 1 + c a round."""

    tau: int = 1
    """Always 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau == 1, ONE_STEP.format("dsgd", "ldsgd"))


@register("dsgd_cta")
@dataclass
class DSGDCTA(OLDSGD):
    """Decentralized SGD, combine then adapt, overlapped: max(1, c) a round."""

    tau: int = 1
    """Always 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tau == 1, ONE_STEP.format("dsgd_cta", "oldsgd"))
