"""What a round of each algorithm holds and sends, counted while its schedule runs.

The unit is one model. A flight holds the snapshot and one received model per neighbour (deg), a
ring all-reduce its sum and 1/n of a model; the transport keeps them for the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .. import algorithms, topology
from ..algorithms import Algorithm
from ..runtime.runner import Runner
from ..simulation.stacked import StackedFlight, StackedReduction, StackedTransport
from . import pages
from .collect import markdown
from .formulas import text_of

N, D, ROUNDS = 4, 64, 3
KEY = "costs"  # of the table in a page


@dataclass(frozen=True)
class Options:
    """Memory and messages of every algorithm, counted from its schedule."""

    write: Path | None = None
    """A Markdown file whose table between the costs markers is brought up to date."""


@dataclass(frozen=True)
class Costs:
    """Of one agent, in models."""

    state: int  # kept over rounds and saved in checkpoints
    work: int  # made and dropped by the schedule, the most at one time
    flights: int  # exchanges open at one time
    reductions: int  # all-reduces open at one time
    exchanges: int  # per round
    all_reduces: int  # per round


class Ledger(TorchFunctionMode):
    """Counts the model-sized tensors that live at one time, apart from those it was told of."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.nbytes = known[0].untyped_storage().nbytes()
        self.known = {y.untyped_storage().data_ptr() for y in known}
        self.live: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.off = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.off:
            self._see(out)
        return out

    def _see(self, out: object) -> None:
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            if storage.nbytes() >= self.nbytes and storage.data_ptr() not in self.known:
                self.live[storage.data_ptr()] = StorageWeakRef(storage)
        self.live = {key: ref for key, ref in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, len(self.live))

    @contextmanager
    def closed(self) -> Iterator[None]:
        before, self.off = self.off, True
        yield
        self.off = before


class CountedTransport(StackedTransport):
    """Counts messages; what it allocates itself stays out of the ledger."""

    def __init__(self) -> None:
        super().__init__(topology.from_name("ring", N))
        self.ledger: Ledger
        self.sent = {"exchange": 0, "all_reduce": 0}
        self.open_at_once = {"exchange": 0, "all_reduce": 0}

    def exchange(self, x: Tensor, round: int, share: float = 1.0) -> StackedFlight:
        with self.ledger.closed():
            flight = super().exchange(x, round, share)
        return self._count(flight)

    def all_reduce(self, x: Tensor, round: int) -> StackedReduction:
        with self.ledger.closed():
            reduction = super().all_reduce(x, round)
        return self._count(reduction)

    def _count(self, flight: Any) -> Any:
        self.sent[flight.kind] += 1
        now = sum(f.kind == flight.kind for f in self._open)
        self.open_at_once[flight.kind] = max(self.open_at_once[flight.kind], now)
        for name in ("mix", "mix_into", "mean"):
            if hasattr(flight, name):
                setattr(flight, name, self._quiet(getattr(flight, name)))
        return flight

    def _quiet(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self.ledger.closed():
                return method(*args, **kwargs)

        return quiet


class Counted(Runner):
    """Runs a schedule whose local steps do nothing, so that only the schedule allocates."""

    alpha = 1.0
    transport: CountedTransport

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(torch.ones(N, D), algorithm, CountedTransport())
        self.g = torch.ones_like(self.x)

    def step(self) -> bool:
        return self.advance(self.g)

    def descend(self, g: Tensor) -> None:
        pass


def count(algorithm: Algorithm) -> Costs:
    runner = Counted(algorithm)
    transport = runner.transport
    ledger = transport.ledger = Ledger([runner.x, runner.g])
    per_round: list[dict[str, int]] = []
    runner.on_round.append(lambda _: per_round.append(dict(transport.sent)))
    with ledger:
        runner.start()
        while runner.r < ROUNDS:
            runner.step()
    last, before = per_round[-1], per_round[-2]
    state = sum(y.dim() > 0 for y in runner.algorithm.state_dict().values())
    runner.finish()
    return Costs(
        state,
        ledger.peak - state,
        transport.open_at_once["exchange"],
        transport.open_at_once["all_reduce"],
        last["exchange"] - before["exchange"],
        last["all_reduce"] - before["all_reduce"],
    )


def table() -> str:
    lines: list[dict[str, Any]] = []
    for name, cls in algorithms.registry().items():
        costs = count(cls())
        holds = _sum((costs.flights, "1 + deg"), (costs.reductions, "1 + 1/n"))
        sends = _sum((costs.exchanges, "deg"), (costs.all_reduces, "2(n-1)/n"))
        lines.append(
            {
                "algorithm": name, "time per round": text_of(name), "state": costs.state,
                "work": costs.work, "transport holds": holds, "sends per round": sends,
            }
        )  # fmt: skip
    return markdown(lines)


def main(options: Options) -> None:
    if options.write is None:
        print(table())
        return
    pages.write(options.write, table(), KEY)
    print(f"Updated {options.write}")


def _sum(*terms: tuple[int, str]) -> str:
    def times(k: int, text: str) -> str:
        return text if k == 1 else f"{k} ({text})" if " " in text else f"{k} {text}"

    return " + ".join(times(k, text) for k, text in terms if k) or "0"
