"""Does everything happen in its order? Rounds of the real transport over poisoned buffers.

Each round sends numbers of its own. A chain of products keeps the training stream busy before they
are written and while they travel, so whoever does not wait for a stream comes too early. Memory
that must not be read is NaN: x as soon as it was handed over, all snapshots after they were mixed.
The comparison runs on the device. The host looks at it after every BATCH rounds only.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...transport.device import device_of
from .messages import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...transport.mpi import MpiTransport

ROUNDS = 2000
BATCH = 50
SIZES = (1, 1003, 65_537)
LARGE = 1 << 20  # on a GPU too: its copies take longer than a launch
CYCLE = 1021  # neighbouring numbers differ
BUSY = 256  # side of the products


class Stress:
    """Buffers of one rank, and its rounds."""

    def __init__(self, transport: MpiTransport, device: torch.device) -> None:
        self.transport, self.device = transport, device_of(device)
        self.sizes = (*SIZES, *([LARGE] if device.type == "cuda" else []))
        self.x = [torch.empty(d, device=device) for d in self.sizes]
        self.out = [torch.empty_like(x) for x in self.x]
        numbers = torch.arange(max(self.sizes), device=device) % CYCLE
        self.base = numbers.to(torch.float32)
        self.wrong = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.a = torch.full((BUSY, BUSY), 1.0 / BUSY, device=device)
        self.b = torch.empty_like(self.a)

    def sent(self, rank: int, round: int, d: int) -> Tensor:
        """Whole numbers below 2^24, which fp32 holds exactly."""
        return self.base[:d] + float((rank * 7919 + round * 31) % 1_000_003)

    def round(self, r: int) -> None:
        k = r % len(self.x)
        x, d, t = self.x[k], self.sizes[k], self.transport
        self._work(r % 4)
        x.copy_(self.sent(t.rank, r, d))
        flight = t.exchange(x, r)
        x.fill_(math.nan)  # ours again
        self._work(r % 3)
        flight.wait()
        y, received = flight.channel.y[:d], [one[:d] for one in flight.received]
        for j, one in zip([t.rank, *flight.neighbours], [y, *received], strict=True):
            self.wrong[r % BATCH] += (one != self.sent(j, r, d)).sum()
        flight.mix(self.out[k])
        self.wrong[r % BATCH] += (~torch.isfinite(self.out[k])).sum()
        for one in (y, *received):
            one.fill_(math.nan)

    def _work(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.a, self.a, out=self.b)

    def batch(self, first: int) -> list[int]:
        """The rounds of a batch that were wrong."""
        self.wrong.zero_()
        for r in range(first, first + BATCH):
            self.round(r)
        self.device.synchronize()
        return [first + k for k, count in enumerate(self.wrong.tolist()) if count]


def measure(
    transport: MpiTransport, device: torch.device, seconds: float, rounds: int
) -> dict[str, Any]:
    """Rounds until they or the seconds are over, the same number on every rank. Collective."""
    stress = Stress(transport, device)
    start, done, wrong, late = time.perf_counter(), 0, list[int](), False
    while done < rounds and not late:
        wrong += stress.batch(done)
        done += BATCH
        took = transport.everywhere(time.perf_counter() - start).result().max()
        late = bool(took > seconds)
    return {"rounds": done, "of": rounds, "wrong": len(wrong), "first": wrong[:3]}


def by_every_way(
    made: Callable[[Mode], MpiTransport], modes: list[Mode], device: torch.device, seconds: float
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in modes:
        transport = made(mode)
        found[mode] = measure(transport, device, seconds / len(modes), ROUNDS)
        transport.close()
    return found
