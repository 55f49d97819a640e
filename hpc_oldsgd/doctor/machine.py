"""One rank's own facts: host, cores, memory, GPU, versions. Plain values, ready for JSON."""

from __future__ import annotations

import os
import platform
import resource
import time
from typing import Any

import torch

from .. import ops
from ..bench.memory import resident
from ..errors import UserError
from ..launch import memory
from ..launch.memory import CGROUP, number
from ..ops import native
from ..runs.folder import versions
from . import network

PACKAGES = ("hpc_oldsgd", "torch", "numpy", "mpi4py")


def facts(device: torch.device) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "place": network.place(),
        "cores": sorted(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count() or 1,
        "quota": _quota(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_available(),
        "rss_bytes": resident("VmRSS"),
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "gpu": gpu(device),
        "cuda_visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "interfaces": network.interfaces(),
        "extension": ops.build_info(),
        "plain_torch_because": native.why_not_on(device),
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        # Wall clock minus the steady clock: a constant, compared between hosts.
        "wall_less_steady_s": time.time() - time.perf_counter(),
    }


def gpu(device: torch.device) -> dict[str, Any] | None:
    """The GPU that a rank of `train` would take; its uuid tells it from the others of a host."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "uuid": str(getattr(found, "uuid", device.index)),
        "visible": torch.cuda.device_count(),
        "index": device.index,
        "free_bytes": free,
        "total_bytes": total,
    }


def memory_available() -> int:
    available = memory.memory_available()
    if available is None:
        raise UserError("this command reads MemAvailable in /proc/meminfo, where there is none")
    return available


def _quota() -> float | None:
    """Cores' worth of time that the job's control group allows."""
    try:
        most, period = (CGROUP / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        pass
    most_us, period_us = (
        number(CGROUP / "cpu" / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    return most_us / period_us if most_us and period_us and most_us > 0 else None
