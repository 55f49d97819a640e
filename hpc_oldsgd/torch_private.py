"""What torch has no public name for, each with a way out for a torch that no longer has it.

No other module uses a private name of torch; tests/repo/test_torch_api.py looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

UNKNOWN = -1
F = TypeVar("F", bound=Callable[..., Any])

BATCH_NORMS: tuple[type[nn.Module], ...] = (
    getattr(nn.modules.batchnorm, "_BatchNorm", nn.BatchNorm2d),  # of all, and of users' own
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
INSTANCE_NORMS: tuple[type[nn.Module], ...] = (
    getattr(nn.modules.instancenorm, "_InstanceNorm", nn.InstanceNorm2d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
DROPOUTS: tuple[type[nn.Module], ...] = (
    getattr(nn.modules.dropout, "_DropoutNd", nn.Dropout),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def version(x: Tensor) -> int:
    """Grows with every change of x in place. UNKNOWN if torch does not count: then x counts as
    changed where a snapshot could be kept, and a user's change inside a round is not noticed."""
    counted: int = getattr(x, "_version", UNKNOWN)
    return counted


def steps_of(scheduler: Any) -> int | None:
    """How often a scheduler was called; it counts its own start."""
    count = getattr(scheduler, "_step_count", None)
    return None if count is None else count - 1


class _ByName:
    """A module's own tensors of one kind, through its public names."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        self._module, self._kind = module, kind

    def items(self) -> list[tuple[str, Tensor]]:
        return list(getattr(self._module, f"named_{self._kind}")(recurse=False))

    def get(self, key: str) -> Any:
        return getattr(self._module, key, None)

    def __setitem__(self, key: str, tensor: Tensor) -> None:
        setattr(self._module, key, tensor)


def held(module: nn.Module) -> list[Any]:
    """Where a module holds its parameters, and where its buffers: dictionaries, or what acts so."""
    kinds = ("parameters", "buffers")
    return [getattr(module, f"_{kind}", None) or _ByName(module, kind) for kind in kinds]


def is_spectral_norm(module: nn.Module) -> bool:
    """torch's parametrization, under a public name too if it gets one."""
    return any(cls.__name__.lstrip("_") == "SpectralNorm" for cls in type(module).__mro__)


def hooks(module: nn.Module) -> list[Any]:
    """Functions that run before or after the module's forward."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return [hook for kind in kinds for hook in getattr(module, kind, {}).values()]


def add_to_all(rows: list[Tensor], more: Iterable[Tensor], alpha: float) -> None:
    """Row by row; torch's own loop is the faster one for a thousand rows."""
    together = getattr(torch, "_foreach_add_", None)
    if together is not None:
        together(rows, more, alpha=alpha)
        return
    for row, one in zip(rows, more, strict=True):
        row.add_(one, alpha=alpha)


def not_compiled(function: F) -> F:
    """torch.compile leaves the call out of its graphs, and runs it as it is.

    The public torch.compiler.disable does the same, and loads torch's compiler for everybody.
    """
    leave_out: Callable[[F], F] = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
    return leave_out(function)


def file_of_torch() -> str:
    """The library that is linked with all others of torch; empty if torch has none of that name."""
    return getattr(getattr(torch, "_C", None), "__file__", "") or ""
