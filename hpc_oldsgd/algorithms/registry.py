"""The algorithms by name."""

from ..registry import Registry
from .base import Algorithm

_algorithms: Registry[Algorithm] = Registry("algorithm", "hpc_oldsgd.algorithms")
register, registry = _algorithms.register, _algorithms.registry
names, get = _algorithms.names, _algorithms.get
