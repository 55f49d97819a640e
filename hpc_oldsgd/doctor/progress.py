"""Do large messages move without help, and what does each progress mode hide and cost?

The measure is that of `bench overlap`: OLDSGD with an emulated gradient that would just hide all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ..algorithms import OLDSGD
from ..bench import overlap
from ..topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

Mode = Literal["none", "poll", "thread"]
MODES: tuple[Mode, ...] = ("none", "poll", "thread")
TAU, ROUNDS = 2, 4
ROOM = 1.2  # tau gradients take this many times as long as the messages alone
ALONE = 0.9  # more than this share hidden without help: messages move by themselves
LEAST_S = 0.004  # of a gradient: a shorter one would measure the polling period, not the network
MESSAGE_S, LARGEST = 0.25, 1 << 26  # a rank holds it once, and once for each neighbour


def size(links: list[dict[str, Any]], model_bytes: int) -> int:
    """Bytes whose exchange takes about a quarter of a second; no more than the model's."""
    rate = min((link["at_once_bytes_per_s"] for link in links), default=0.0)
    return max(4, int(min(model_bytes, LARGEST, MESSAGE_S * rate)) // 4 * 4)


def measure(
    comm: MPI.Comm,
    topology: Topology,
    device: torch.device,
    nbytes: int,
    threads: bool,
    load: Literal["sleep", "spin"],
) -> dict[str, Any]:
    """t_c of an exchange of `nbytes` without compute, then each mode. Collective."""
    from ..transport.mpi import MpiTransport

    def made(mode: Mode) -> MpiTransport:
        return MpiTransport(comm, topology, progress=mode)

    def options(mode: Mode, grad_seconds: float) -> overlap.Options:
        return overlap.Options(
            tau=TAU, grad_seconds=grad_seconds, load=load, model_bytes=nbytes, rounds=ROUNDS,
            progress=mode, device="cuda" if device.type == "cuda" else "cpu",
        )  # fmt: skip

    modes = [mode for mode in MODES if mode != "thread" or threads]
    idle = made(modes[-1])
    t_c = overlap.exchange_alone(idle, overlap.flat_model(options(modes[-1], 0.0), comm.rank))
    staging = "direct"
    if idle.staging is not None and idle.staging.copies:
        staging = "host"
    grad_seconds = max(LEAST_S, ROOM * t_c / TAU)
    gradient = overlap.Gradient(options(modes[-1], grad_seconds), idle)
    t_g = overlap.gradient_alone(idle, gradient)
    idle.close()
    results = []
    for mode in modes:
        chosen = options(mode, grad_seconds)
        result = overlap.measure(chosen, OLDSGD(tau=TAU), made(mode), gradient, t_g, t_c)
        # Relative to the time that the messages take alone: without progress they take much longer.
        hidden = 1 - result["exposed_s"] / t_c if comm.size > 1 else 1.0
        results.append({"mode": mode, **result, "hidden": max(0.0, hidden)})
    return {"bytes": nbytes, "t_c": t_c, "t_g": t_g, "staging": staging, "modes": results}


def best(results: list[dict[str, Any]]) -> str:
    """The most helpful that loses less than 5% to the fastest: a larger model may need it.

    Nobody as the mover of messages counts only where they move by themselves.
    """
    able = [one for one in results if one["mode"] != "none" or one["hidden"] > ALONE] or results
    fastest = min(result["round_s"] for result in able)
    good = [result["mode"] for result in able if result["round_s"] <= 1.05 * fastest]
    return str(max(good, key=MODES.index))
