"""Overlapping Local Decentralized SGD: the public API."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import Diverged, NeighbourTimeout, UserError
from .launch import frameworks, openmpi  # noqa: F401

if TYPE_CHECKING:
    from . import algorithms, simulate, tasks, theory, topology
    from .algorithms import OLDSGD
    from .ops import fused_mix, fused_mix_delta
    from .runtime.agent import Agent
    from .topology import Topology
    from .training.measure import make_plan

    __version__: str

# Loaded on first use: a command that only prints help need not import torch.
_WHERE = {
    "Agent": ".runtime.agent",
    "OLDSGD": ".algorithms",
    "Topology": ".topology",
    "fused_mix": ".ops",
    "fused_mix_delta": ".ops",
    "make_plan": ".training.measure",
}
_MODULES = ("algorithms", "simulate", "tasks", "theory", "topology")

__all__ = [
    "OLDSGD",
    "Agent",
    "Diverged",
    "NeighbourTimeout",
    "Topology",
    "UserError",
    "__version__",
    "algorithms",
    "fused_mix",
    "fused_mix_delta",
    "make_plan",
    "simulate",
    "tasks",
    "theory",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("hpc_oldsgd")
        except metadata.PackageNotFoundError:  # the source tree, not installed
            return "0+unknown"
    if name in _WHERE:
        return getattr(import_module(_WHERE[name], __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
