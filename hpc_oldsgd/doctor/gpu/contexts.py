"""On which GPUs has this process a context? Each takes some hundred megabytes there."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def measure(device: torch.device, library: Any = None) -> dict[str, Any]:
    """Asks CUDA's driver, which opens none."""
    opened = None
    if device.type == "cuda" or library is not None:
        opened = _opened(library)
    return {"own": device.index or 0, "opened": opened}


def _opened(library: Any) -> list[int] | None:
    try:
        driver = library or ctypes.CDLL("libcuda.so.1")
        count, found = ctypes.c_int(), []
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return None
        for ordinal in range(count.value):
            device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
            if driver.cuDeviceGet(ctypes.byref(device), ordinal) or (
                driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            ):
                return None
            if active.value:
                found.append(ordinal)
    except (OSError, AttributeError):
        return None
    return found
