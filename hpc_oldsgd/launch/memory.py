"""Free memory of this machine, as the kernel and the job's control group tell it."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_MEMORY = (  # version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def memory_available() -> int | None:
    """Of the host, or what the job's memory limit leaves if that is less; None if unknown."""
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):  # not Linux
        return None
    for limit, used in CGROUP_MEMORY:
        most, now = number(CGROUP / limit), number(CGROUP / used)
        if most is not None and now is not None:
            available = min(available, max(0, most - now))
    return available


def number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
