"""Requests, the engine that starts and tests them, and tensors as MPI sees them: bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import torch
from mpi4py import MPI

from ...errors import UserError
from ..progress import Engine, NativeEngine, PythonEngine

Progress = Literal["auto", "thread", "poll", "none"]


class PersistentRequests:
    """Persistent receives and sends over fixed buffers, started and tested together."""

    def __init__(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        self.receives = list(receives)
        self.sends = list(sends)
        self._all = [*self.receives, *self.sends]
        size = MPI._sizeof(MPI.Request)
        # Handles of persistent requests never change, so a copy of them is as good.
        self._handles = (ctypes.c_char * max(1, size * len(self._all)))()
        for k, request in enumerate(self._all):
            ctypes.memmove(
                ctypes.addressof(self._handles) + k * size, MPI._addressof(request), size
            )
        self.native = (ctypes.addressof(self._handles), len(self.receives), len(self._all))

    def start(self) -> None:
        # Receives first: a message that arrives unexpected is copied twice.
        if self.receives:
            MPI.Prequest.Startall(self.receives)
        if self.sends:
            MPI.Prequest.Startall(self.sends)

    def test(self) -> bool:
        return bool(MPI.Request.Testall(self._all)) if self._all else True

    def free(self) -> None:
        for request in self._all:
            request.Free()


class StartedRequest:
    """One nonblocking collective that the caller has started."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.native = (MPI._addressof(request), 1, 1)  # MPI nulls the handle in place

    def start(self) -> None:
        """The caller has."""

    def test(self) -> bool:
        return bool(self._request.Test())


def as_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's memory for MPI, uncopied: any dtype, also those MPI does not know."""
    assert tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), MPI.BYTE]


def pieces(tensor: torch.Tensor, limit_bytes: int) -> list[torch.Tensor]:
    """Slices of at most `limit_bytes`: an int count ends at 2^31, and some MPIs before."""
    step = max(1, limit_bytes // tensor.element_size())
    return [tensor[a : a + step] for a in range(0, max(1, tensor.numel()), step)]


def functions() -> dict[str, int]:
    """Addresses in the MPI library that mpi4py has loaded."""
    library = ctypes.CDLL(MPI.__file__)  # looks through the libraries it is linked with
    names = ("MPI_Startall", "MPI_Testall")
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}


def sizes() -> tuple[int, int]:
    return MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)


def make_engine(native: bool, threaded: bool) -> Engine:
    return NativeEngine(functions(), sizes(), threaded) if native else PythonEngine(threaded)


def choose_progress(progress: Progress) -> Progress:
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    if progress == "auto":
        return "thread" if threads else "poll"
    if progress == "thread" and not threads:
        raise UserError(
            "progress=thread needs MPI_THREAD_MULTIPLE, which this MPI did not grant: use poll"
        )
    return progress
