"""The algorithms by name."""

from __future__ import annotations

from ..errors import UserError
from ..registry import Registry
from .base import Algorithm

_algorithms: Registry[Algorithm] = Registry("algorithm", "hpc_oldsgd.algorithms")
register, registry = _algorithms.register, _algorithms.registry
names, get = _algorithms.names, _algorithms.get


def with_tau(name: str, tau: int) -> Algorithm | None:
    """None for the algorithms of one step a round at another tau."""
    try:
        return get(name)(tau=tau)
    except UserError:
        if tau < 1 or name not in names():
            raise
        return None


def near_tau(name: str, tau: int) -> Algorithm:
    """With the number of steps a round that is asked for, else with its own."""
    return with_tau(name, tau) or get(name)()
