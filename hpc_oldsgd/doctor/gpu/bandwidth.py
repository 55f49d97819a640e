"""How fast the ops stream the device's memory, against a copy on it and its theoretical peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...bench import mix

WIRES = ("fp32", "bf16", "int8", "int4")
FORMS = ("gradient, round", "delta, round", "round")  # as an agent calls them
ON_GPU, ON_CPU = 1 << 26, 1 << 23  # numbers of the model
MODELS = 24  # as many must fit into free memory: the buffers take ten, and ranks may share a GPU
LEAST_S = 0.02  # of calls that are timed together: the synchronisation counts for nothing


def measure(device: torch.device, seconds: float) -> dict[str, Any]:
    """Bytes a second that each op must move, at degree 2. Least of the repeats that fit."""
    n = size(device)
    until, rates = time.perf_counter() + seconds, {}
    skipped = []
    copy = 0.0
    for k, wire in enumerate(WIRES):
        if k and time.perf_counter() > until:
            skipped.append(wire)
            continue
        share = (until - time.perf_counter()) / (len(WIRES) - k)
        with torch.device(device):
            copies, others = mix.candidates(mix.Options(compile=False), wire, n)
        wanted = [c for c in others if c.name == "ours" and c.form in FORMS]
        timed([copies[0], *wanted], device, share)
        copy = max(copy, copies[0].streams_bytes / min(copies[0].seconds))
        for c in wanted:
            name = f"{wire} {c.form.partition(',')[0]}".replace(" round", "")
            rates[name] = c.streams_bytes / min(c.seconds)
    return {
        "numbers": n,
        "copy_bytes_per_s": copy,
        "peak_bytes_per_s": peak(device),
        "bytes_per_s": rates,
        "skipped": skipped,
    }


def size(device: torch.device) -> int:
    if device.type != "cuda":
        return ON_CPU
    free = torch.cuda.mem_get_info(device)[0]
    return max(1 << 20, min(ON_GPU, free // (4 * MODELS)))


def timed(candidates: list[mix.Candidate], device: torch.device, seconds: float) -> None:
    """Candidates take turns, so that a disturbance meets all of them."""
    calls = {id(c): _calls(c.call, device) for c in candidates}
    until = time.perf_counter() + seconds
    while True:
        for c in candidates:
            c.seconds.append(_seconds(c.call, calls[id(c)], device))
        if len(candidates[0].seconds) >= 9 or time.perf_counter() > until:
            return


def _calls(call: Callable[[], Any], device: torch.device) -> int:
    """That take LEAST_S together."""
    _seconds(call, 1, device)
    return max(1, min(1000, round(LEAST_S / max(_seconds(call, 1, device), 1e-6))))


def _seconds(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def peak(device: torch.device) -> float | None:
    """Memory clock times bus width, twice: on both edges. None where torch does not know them."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_properties(device))


def peak_of(properties: Any) -> float | None:
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    width = getattr(properties, "memory_bus_width", 0)
    return 2e3 * kilohertz * width / 8 if kilohertz and width else None
