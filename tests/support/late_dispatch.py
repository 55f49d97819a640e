"""Torch operations that go to a stream of late_device.py, and the memory that they use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

if TYPE_CHECKING:
    from .late_device import LateDevice
    from .late_streams import LateStream

READS_TO_HOST = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")


class Owned(np.ndarray):  # type: ignore[type-arg]
    """The user's hold on a piece of memory: when it ends, the allocator may give it away."""


class Memory:
    """Allocated on a stream, as torch's caching allocator does it.

    Once it is freed, that stream gets it again at once. Whatever another stream still has to do
    with it may then find something else there, unless the first stream has waited for it.
    """

    def __init__(self, device: LateDevice, nbytes: int) -> None:
        self.device, self.stream = device, device.current_stream()
        self._bytes = np.empty(max(nbytes, 1), dtype=np.uint8)
        self._used: dict[LateStream, int] = {}  # the number of the last work on each stream
        owned = self._bytes.view(Owned)
        weakref.finalize(owned, self._freed)
        self.user = torch.from_numpy(owned).untyped_storage()
        self.address = self.user.data_ptr()

    def tensor(self, like: torch.Tensor, user: bool) -> torch.Tensor:
        """With the user's hold on the memory, or without."""
        storage = self.user if user else torch.from_numpy(self._bytes).untyped_storage()
        made = torch.empty(0, dtype=like.dtype)
        return made.set_(storage, like.storage_offset(), like.shape, like.stride())

    def use(self, stream: LateStream, number: int) -> None:
        self._used[stream] = number

    def _freed(self) -> None:
        self.device.memories.pop(self.address, None)
        for stream, number in self._used.items():
            waited = self.stream.waited.get(stream, 0)
            if stream is not self.stream and max(stream.done, waited) < number:
                self.device.freed_early.append(f"memory that {stream.name} still uses")


class Enqueue(TorchDispatchMode):
    """One thread's torch operations go to its stream."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        device, kwargs = self.device, kwargs or {}
        if device.busy:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        returns = [r.alias_info for r in func._schema.returns]
        written = [a.alias_info for a in func._schema.arguments]
        writes = any(info is not None and info.is_write for info in written)
        with device.executing():
            if not writes and any(info is not None for info in returns):
                return func(*args, **kwargs)  # a view
            if tensors and all(map(device.is_pinned, tensors)):
                return func(*args, **kwargs)  # the host's own work
            if name in READS_TO_HOST:
                device.counts["training synchronised by a read"] += 1
                stream = device.current_stream()
                stream.reach(stream.enqueued)
                return func(*args, **kwargs)
            if not tensors or name.startswith(("empty", "new_empty")):
                made = func(*args, **kwargs)
                return device.allocate(made) if "empty" in name else made
            now, named = tree_map_only(torch.Tensor, device.alias, (args, kwargs))
            if writes:
                device.enqueue(name, tensors, lambda: func(*now, **named))
                given = (*args, *kwargs.values())
                return given[0] if returns else None
            return self._later(name, func, tensors, now, named)

    def _later(self, name: str, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        """Its results are memory that is poison until it has run."""
        shapes = func(*tree_map_only(torch.Tensor, _meta, args), **_on_meta(kwargs))
        made = tree_map_only(torch.Tensor, self.device.allocate, shapes)

        def run() -> None:
            results = [t for t in tree_iter(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            targets = [t for t in tree_iter(aliases) if isinstance(t, torch.Tensor)]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        aliases = tree_map_only(torch.Tensor, self.device.alias, made)
        new = [t for t in tree_iter(made) if isinstance(t, torch.Tensor)]
        self.device.enqueue(name, [*tensors, *new], run)
        return made


def _meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    moved = tree_map_only(torch.Tensor, _meta, kwargs)
    return {**moved, "device": torch.device("meta")} if "device" in moved else moved


def poison(t: torch.Tensor) -> torch.Tensor:
    if t.dtype is torch.bool:
        return t
    return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(0x7F)


def address(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()
