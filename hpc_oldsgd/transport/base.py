"""The contracts between an algorithm and whatever carries its messages.

`exchange(x)` copies x into memory the transport owns, the wire snapshot y_i, and starts it: the
caller may change x at once. The `Flight` it returns is always waited, at shutdown too.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..topology import Topology
from .heartbeat import Status
from .late import Late
from .narrow import Narrow, Stream, Streams, tail_start
from .trace import Trace

RECORDS_KEPT = 4096
LINE = 32  # elements: a cache line of the narrowest type, two or four of the others


@dataclass(frozen=True)
class FlightRecord:
    """One finished flight: seconds of `time.perf_counter`, or units of the virtual clock."""

    kind: str  # "exchange" or "all_reduce"
    round: int
    posted: float
    completed: float
    exposed: float  # how long the caller stood waiting
    left_out: float = 0.0  # neighbours whose snapshot was late and not used, per agent
    share: float = 1.0  # of a model that it carried

    @property
    def transfer(self) -> float:
        return self.completed - self.posted


class FadingTail(Protocol):
    """The end of x, where it holds averages of which earlier values fade from pass to pass."""

    @property
    def x(self) -> torch.Tensor:
        """The first agent's."""

    @property
    def start(self) -> int:
        """Where it begins in x."""

    def passes(self) -> torch.Tensor:
        """How many passes there were so far, of every agent here."""

    def left(self, since: torch.Tensor) -> torch.Tensor:
        """(agents, d - start): the share that is left of the values after `since` passes."""


class Flight(ABC):
    """A message to every neighbour, and theirs to us, on the way: a model, or a fragment of one."""

    part = ""
    """Which fragment, for a trace: 2/5 is the second of five."""

    def __init__(self, x: torch.Tensor, tail: FadingTail | None) -> None:
        """x is what is sent; the flight does not keep it alive."""
        self._sent = (x.data_ptr(), x.shape)
        if tail is not None and _memory(tail.x) != _memory(x):
            tail = None  # not a part of the model: an algorithm's own tensor
        self._tail = tail
        self._passes = None if tail is None else tail.passes()

    def faded(self, x: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Where in x the fading tail begins, and the share that is left of what was sent.

        None where x has no part of the tail, or is not the tensor that was sent.
        """
        tail = self._tail
        if tail is None or self._passes is None or (x.data_ptr(), x.shape) != self._sent:
            return None
        offset, length = int(x.storage_offset() - tail.x.storage_offset()), x.shape[-1]
        start = tail_start(x, tail)
        if start >= length:
            return None
        first = offset + start - tail.start
        return start, tail.left(self._passes)[:, first : first + length - start]

    @abstractmethod
    def wait(self) -> None:
        """Return once every message is here and ours is out. Safe to call twice."""

    @abstractmethod
    def mix_into(
        self,
        x: torch.Tensor,
        *,
        snapshot: bool = False,
        also: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """x += e with e = sum_j w_ij (y_j - y_i), one fused pass; ends the flight.

        With `snapshot` the same pass writes the snapshot of the new x. The next `exchange(x)` then
        copies nothing, unless x's version counter has grown since. `also=(z, factor)` adds
        factor e to z, a second pass; not where x holds averages that fade, which z leaves alone.
        """

    @abstractmethod
    def mix(
        self,
        out: torch.Tensor,
        acc: torch.Tensor | None = None,
        alpha: float = 0.0,
        *,
        zero_acc: bool = False,
        snapshot: bool = False,
    ) -> torch.Tensor:
        """out = sum_j w_ij y_j - alpha acc (own y included), one fused pass; ends the flight."""


class Reduction(ABC):
    """An average over all agents, on the way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `mean` would not wait."""

    @abstractmethod
    def wait(self) -> None: ...

    @abstractmethod
    def mean(self, out: torch.Tensor) -> torch.Tensor:
        """out = (1/n) sum_i x_i, summed in one fixed order on every agent; ends the reduction."""


class Pending(ABC):
    """A few numbers on their way to every agent: losses, votes."""

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def result(self) -> NDArray[np.float64]: ...


Wire = torch.dtype | Narrow | None
"""What travels: the model's type if None, a narrower one, or differences in a few bits."""


class Transport(ABC):
    """Carries the messages of one agent (x is (d,)), or of all of them at once (x is (n, d))."""

    def __init__(self, topology: Topology, trace: Trace | None = None, wire: Wire = None) -> None:
        self.topology = topology
        self.wire = wire
        self.trace = trace
        self.late: Late | None = None
        self.status = Status()
        self._records: deque[FlightRecord] = deque(maxlen=RECORDS_KEPT)
        self.tail: FadingTail | None = None
        """Of the x that is sent; the runner sets it."""
        self.model: torch.Tensor | None = None
        """The whole x; the runner sets it."""
        self.settled: Callable[[], bool] = lambda: False
        """Whether x stays as a mix leaves it until it is sent; the runner sets it."""
        self.streams: Streams | None = None
        """Of a wire that sends differences (narrow.py)."""
        self.begin_streams()
        self.measure_distance = False
        self._distances: list[torch.Tensor | float] = []  # of the fragments of x mixed last

    @property
    def n(self) -> int:
        return self.topology.n

    @property
    def records(self) -> deque[FlightRecord]:
        """Of all flights that were waited for. On a GPU this may wait until their times are known.

        A reader that must not wait calls `settle_times(False)` and reads `known_records`.
        """
        self.settle_times(True)
        return self._records

    @records.setter
    def records(self, records: deque[FlightRecord]) -> None:
        self._records = records

    @property
    def known_records(self) -> deque[FlightRecord]:
        return self._records

    def settle_times(self, wait: bool) -> None:  # noqa: B027
        """Make records of the flights whose times are known by now, or of all with `wait`."""

    def add_record(self, record: FlightRecord) -> None:
        self._records.append(record)

    def wire_type(self, model: torch.dtype) -> torch.dtype:
        """Of the snapshots, or of the public copies in their place."""
        return self.wire if isinstance(self.wire, torch.dtype) else model

    def begin_streams(self) -> None:
        """Anew, on the topology as it is now."""
        if isinstance(self.wire, Narrow):
            self.streams = Streams(self.wire.bits, self.topology.period)

    def open_stream(self, x: torch.Tensor, round: int) -> Stream:
        assert self.streams is not None
        return self.streams.open(x, round, self.model, self.tail)

    @property
    def distance(self) -> torch.Tensor | float | None:
        """sum_j w_ij ||y_j - y_i||^2 as last measured by `mix_into`, per agent."""
        return sum(self._distances[1:], self._distances[0]) if self._distances else None

    @distance.setter
    def distance(self, value: torch.Tensor | float | None) -> None:
        self._distances = [] if value is None else [value]

    def add_distance(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """That of a model, or of one more fragment; the fragment at its beginning is the first."""
        if x.storage_offset() == 0:
            self._distances.clear()
        self._distances.append(value)

    @abstractmethod
    def exchange(self, x: torch.Tensor, round: int, share: float = 1.0) -> Flight:
        """Start x, which is that share of a model, on its way to the neighbours of the round."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, round: int) -> Reduction: ...

    @abstractmethod
    def snapshot_mean(self, x: torch.Tensor, round: int) -> Reduction:
        """An average to look at, not part of the algorithm: never recorded or charged."""

    @abstractmethod
    def computed(self) -> None:
        """A gradient was just computed: the virtual clock charges it, a polled MPI progresses."""

    @abstractmethod
    def now(self) -> float:
        """Seconds, or the virtual time of the slowest agent."""

    @abstractmethod
    def reduce(self, values: NDArray[np.float64], op: Literal["sum", "max"] = "sum") -> Pending:
        """Reduce a few numbers over all agents without a stall. Collective."""

    def everywhere(self, *values: float) -> Pending:
        """Row i of the result: what rank i gave. Collective."""
        table = np.zeros((self.n, len(values)))
        table[getattr(self, "rank", 0)] = values
        return self.reduce(table)

    @abstractmethod
    def drain(self) -> None:
        """Complete and drop every open flight. Collective."""

    def free_memory(self) -> None:  # noqa: B027
        """After drain(): drop what further flights would use again. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Drain, and free what the flights used. Collective; safe to call twice."""


def cut(x: torch.Tensor, fragments: int) -> list[torch.Tensor]:
    """Views of x in whole lines, the first ones at most a line longer; x itself if it is one."""
    if fragments == 1:
        return [x]
    return [x[..., a:b] for a, b in ring_chunks(x.shape[-1], fragments)]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def ring_chunks(d: int, n: int) -> list[tuple[int, int]]:
    """The n slices of the ring all-reduce, in whole lines; the first ones are one line longer.

    Each starts its sum at another agent. By lines, what pads a model behind its end (flat.py) moves
    no element into another slice: the sum has the same bits with and without.
    """
    small, longer = divmod(-(-d // LINE), n)
    bounds = [0]
    for k in range(n):
        bounds.append(min(d, bounds[-1] + LINE * (small + (k < longer))))
    return list(itertools.pairwise(bounds))


def ring_mean(nth: Callable[[int], torch.Tensor], n: int) -> torch.Tensor:
    """(1/n) sum_i x_i in the type of a sum, added in the order of the ring all-reduce.

    `nth(step)` holds of chunk k what agent k + step has: where the ring is after as many steps.
    """
    first = nth(0)
    total = first.to(sum_type(first.dtype), copy=True)
    for step in range(1, n):
        total += nth(step)
    return total.div_(n)


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """What a sum over all agents is taken in: in fp16 it would overflow where no agent's x does."""
    return torch.float32 if dtype.itemsize < 4 else dtype
