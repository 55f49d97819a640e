"""The few calls of a device that staging and the transport use, and nothing else of it.

`Gpu` hands them to torch. `Host` is the CPU: what is enqueued has happened when the call returns,
so there is nothing to wait for. The tests put a device of their own in the place of both
(tests/support/late_device.py), whose streams run their work as late as they may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Size, Tensor, dtype


class Event(Protocol):
    """A place in a stream."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        """Whether the stream has come there."""

    def synchronize(self) -> None:
        """This thread waits until the stream has come there."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds on the device from here to `end`; both were made with `timing`."""


class Stream(Protocol):
    def wait_event(self, event: Any) -> None:
        """What is enqueued from now on runs after the event; the caller does not wait."""


class Device(Protocol):
    torch: torch.device
    is_host: bool
    """Its memory is the host's: MPI may read it, and a call returns when its work is done."""

    def make_current(self) -> None:
        """The calling thread works with this device, and with no other one by default."""

    def native_context(self) -> tuple[int, int] | None:
        """The same for a thread without Python: a C function's address and its argument."""

    def new_stream(self) -> Stream: ...

    def current_stream(self) -> Stream: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What this thread enqueues goes to `stream`."""

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        """`blocking`: a thread that waits for it sleeps. Otherwise it spins."""

    def pinned(self, shape: Size, dtype: dtype) -> Tensor:
        """Host memory, to and from which the device copies while nobody waits."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueued on the current stream."""

    def synchronize(self) -> None:
        """This thread waits for all that is enqueued on any stream."""

    def capturing(self) -> bool:
        """A CUDA graph is being made of what this thread enqueues."""


class Host:
    """The CPU. Also every event and stream of it: they are where they should be at once."""

    is_host = True

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def make_current(self) -> None: ...

    def native_context(self) -> None:
        return None

    def new_stream(self) -> Stream:
        return _Now()

    def current_stream(self) -> Stream:
        return _Now()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        return _Now()

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def synchronize(self) -> None: ...

    def capturing(self) -> bool:
        return False


class _Now:
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def wait_event(self, event: Any) -> None: ...


class Gpu:
    is_host = False

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self._api: Any = torch.get_device_module(device)

    def make_current(self) -> None:
        self._api.set_device(self.torch)

    def native_context(self) -> tuple[int, int] | None:
        with self._api.device(self.torch):
            return driver_context(self._api.current_device())

    def new_stream(self) -> Stream:
        made: Stream = self._api.Stream(device=self.torch)
        return made

    def current_stream(self) -> Stream:
        current: Stream = self._api.current_stream(self.torch)
        return current

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        chosen: AbstractContextManager[Any] = self._api.stream(stream)
        return chosen

    def event(self, *, blocking: bool = False, timing: bool = False) -> Event:
        made: Event = self._api.Event(blocking=blocking, enable_timing=timing)
        return made

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        self._api.synchronize(self.torch)

    def capturing(self) -> bool:
        return bool(self._api.is_current_stream_capturing())


def driver_context(ordinal: int, library: Any = None) -> tuple[int, int] | None:
    """cuCtxSetCurrent and the context that torch uses on this device, from CUDA's driver.

    A native thread that calls it works with that context, and opens none of its own. It needs no
    CUDA header and no build with nvcc. None where there is no such driver.
    """
    try:
        driver = library or ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), ordinal)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )
        function = ctypes.cast(driver.cuCtxSetCurrent, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    return None if failed or not function else (function, context.value or 0)


_stand_in: Device | None = None


def device_of(device: torch.device) -> Device:
    if _stand_in is not None:
        return _stand_in
    return Host(device) if device.type == "cpu" else Gpu(device)


@contextmanager
def standing_in(device: Device) -> Iterator[None]:
    """For a test: `device` takes the place of every other one."""
    global _stand_in
    before, _stand_in = _stand_in, device
    try:
        yield
    finally:
        _stand_in = before
