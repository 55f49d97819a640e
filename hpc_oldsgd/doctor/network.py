"""Which network the bytes take: whose counter rises when a known number of them is sent."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CARDS = Path("/sys/class/net")
FABRIC = Path("/sys/class/infiniband")  # InfiniBand, Omni-Path and RoCE count here
LOOPBACK, INFINIBAND = "772", "32"
MOST = 0.5  # of the bytes: a card that counted this share has carried them


def place() -> str:
    """Ranks of one place see the same counters: a host, or a network namespace of it."""
    try:
        space = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        space = ""
    return f"{platform.node()} {space}".strip()


def counters() -> dict[str, int]:
    """Bytes sent so far by every interface."""
    sent: dict[str, int] = {}
    table = Path("/proc/self/net/dev")
    if table.exists():
        for line in table.read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            sent[name.strip()] = int(numbers.split()[8])
    for port in sorted(FABRIC.glob("*/ports/*")):
        words = _read(port / "counters" / "port_xmit_data")
        if words.isdecimal():
            sent[f"{port.parent.parent.name}/{port.name}"] = 4 * int(words)  # counted in words
    return sent


def interfaces() -> list[dict[str, Any]]:
    """What could carry bytes: name, kind, bit/s where the driver knows it, whether it is up."""
    found: list[dict[str, Any]] = []
    for card in sorted(CARDS.glob("*")):
        kind = {LOOPBACK: "loopback", INFINIBAND: "IP over InfiniBand"}.get(
            _read(card / "type"), "Ethernet"
        )
        megabits = _read(card / "speed")
        rate = int(megabits) * 1e6 if megabits.isdecimal() and int(megabits) else None
        up = _read(card / "operstate") in ("up", "unknown")
        found.append({"name": card.name, "kind": kind, "bits_per_s": rate, "up": up})
    for port in sorted(FABRIC.glob("*/ports/*")):
        gigabits = _read(port / "rate").split(" ")[0]
        found.append(
            {
                "name": f"{port.parent.parent.name}/{port.name}",
                "kind": _read(port / "link_layer") or "InfiniBand",
                "bits_per_s": float(gigabits) * 1e9
                if gigabits.replace(".", "").isdecimal()
                else None,
                "up": "ACTIVE" in _read(port / "state"),
            }
        )
    return found


def by_place(
    places: Sequence[str], rises: Sequence[Mapping[str, int]], sent: Sequence[int]
) -> dict[str, list[str]]:
    """Place -> the interfaces that carried what its ranks sent.

    Each rank saw the rise of its own place's counters.
    """
    found: dict[str, list[str]] = {}
    for where in dict.fromkeys(places):
        ranks = [i for i, other in enumerate(places) if other == where]
        total = sum(sent[i] for i in ranks)
        seen = {name: max(rises[i].get(name, 0) for i in ranks) for i in ranks for name in rises[i]}
        if total:
            found[where] = sorted(name for name, rise in seen.items() if rise >= MOST * total)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
