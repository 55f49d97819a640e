"""Drives one algorithm's schedule: feeds it gradients, counts, and marks round boundaries.

What an algorithm sees is this class: x, n, alpha, descend, exchange, all_reduce, rounds. x is (d,)
for one agent over MPI and (n, d) for all of them in one process; the algorithm cannot tell.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Self

from ..errors import UserError
from ..torch_private import version
from ..transport.base import FadingTail, Flight, Reduction, Transport, cut
from ..transport.late import NO_EDGES
from ..transport.trace import Trace
from .unread_gradient import UNREAD

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm

Schedule = Generator[None, Tensor, None]
Hook = Callable[["Runner"], None]


class Runner(ABC):
    """One algorithm on one transport.

    `step` collects the gradient and calls `advance`, which resumes the schedule. The schedule calls
    `descend`, `exchange` and, through `rounds`, the hooks. A kind of runner fills in alpha, descend
    and step, and version if weights can change without x's version counter.
    """

    def __init__(
        self,
        x: Tensor,
        algorithm: Algorithm,
        transport: Transport,
        trace: Trace | None = None,
        tail: FadingTail | None = None,
    ) -> None:
        self.x = x
        """Its version counter tells whether a snapshot is current (see `Flight.mix_into`). Changes
        that torch does not count, through p or p.data, are counted here."""
        algorithm.check(transport.topology)
        self.algorithm = copy.deepcopy(algorithm)  # its state is this runner's alone
        self.transport = transport
        transport.tail, transport.model = tail, x
        transport.settled = lambda: not self.on_round
        self.trace = trace
        self.t = 0  # gradients taken
        self.r = 0  # rounds completed
        self.finished = False
        self.on_round: list[Hook] = []
        """Called at every round boundary, before the next message leaves. A hook may change weights
        and may call `stop()`."""
        self.observers: list[Hook] = []
        """Called after them. An observer changes no weight, so the snapshot that the last mix has
        written need not be copied again."""
        self._gradient_start = 0.0
        self._stop = False
        self._t_boundary = 0
        self._begun_at = 0  # the t at which the algorithm's state was or will be prepared
        self._schedule: Schedule | None = None
        self._version_left = 0
        """`version()` when the schedule last gave up control."""

    # -- what an algorithm calls ---------------------------------------------------------------

    @property
    @abstractmethod
    def alpha(self) -> float: ...

    @property
    def n(self) -> int:
        """How many agents there are."""
        return self.transport.n

    @abstractmethod
    def descend(self, g: Tensor) -> None:
        """One local optimizer step along g: x <- x - alpha g for plain SGD."""

    def exchange(self, x: Tensor) -> Flight:
        """Send x, or a fragment of it, to the neighbours; theirs come back."""
        flight = self.transport.exchange(x, self.r, x.shape[-1] / self.x.shape[-1])
        if self.trace is not None and x is not self.x:
            flight.part = self._part(x)
        return flight

    def cut(self, x: Tensor, fragments: int) -> list[Tensor]:
        """A tensor of x's shape as that many views, each in whole cache lines."""
        return cut(x, fragments)

    def all_reduce(self, x: Tensor) -> Reduction:
        if self.transport.late is not None:
            raise UserError(NO_EDGES)
        return self.transport.all_reduce(x, self.r)

    def rounds(self) -> Iterator[int]:
        """`for _ in agent.rounds()`: each turn is a round; its top is where a checkpoint fits."""
        while not self._boundary():
            yield self.r
            self.r += 1

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.x)

    # -- what a training loop calls ------------------------------------------------------------

    def start(self) -> None:
        """Post the first messages, before the first gradient is computed."""
        self._schedule = self.algorithm.schedule(self)
        self._resume(None)

    @property
    def started(self) -> bool:
        return self._schedule is not None

    @abstractmethod
    def step(self) -> bool:
        """After the backward pass: hand the gradient over. False once the run has stopped."""

    def version(self) -> int:
        """Grows with every change of the weights that torch counts."""
        return version(self.x)

    def advance(self, g: Tensor) -> bool:
        """Hand the schedule a gradient at x. False once the run has stopped."""
        if self.finished:
            return False
        if self._schedule is None:
            raise UserError(
                "an earlier step failed in the middle of a round, which cannot go on: end the job, "
                "or load_state_dict() of a checkpoint on all ranks"
            )
        if self.algorithm.rebuilds_x and self.version() != self._version_left:
            raise UserError(
                'weights were changed inside a round, which form="gradient" would undo: make the '
                'Agent after weights are loaded, or use form="delta"'
            )
        self.t += 1
        self.transport.computed()
        if self.trace is not None:
            start, end = self._gradient_start, self.trace.now()
            self.trace.span("compute", "gradient", start, end, t=self.t, round=self.r)
        self._resume(g if self.algorithm.reads_gradient else UNREAD)
        return not self.finished

    def stop(self) -> None:
        """End the schedule at this round boundary."""
        self._stop = True

    def finish(self) -> None:
        """Complete every flight. Collective; safe to call twice."""
        self.finished = True
        if self._schedule is not None:
            self._schedule.close()
            self._schedule = None
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error the neighbours may never answer
            self.finish()

    # -- after the loss of an agent ------------------------------------------------------------

    @property
    def next_boundary(self) -> tuple[int, int]:
        """Round and iteration of the boundary at the end of the local steps under way."""
        if self.t == self._t_boundary:
            return self.r, self.t
        return self.r + 1, self._t_boundary + self.algorithm.tau

    def stand_at(self, r: int) -> None:
        """x as it is now counts as the x of boundary r."""
        self.r, self._t_boundary = r, self.t

    def begin_anew(self) -> None:
        """Start again from x as it is now, with the algorithm's state as at the first round."""
        self.finished, self._stop = False, False
        self._begun_at = self.t
        self.algorithm.load_state_dict({}, like=self.x)
        self.start()

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that outlives a round boundary; no message in flight belongs to it."""
        self._check_boundary("a checkpoint")
        # At the start a schedule has prepared its state, and is to prepare it again.
        algorithm = self.algorithm.state_dict() if self.t > self._begun_at else {}
        state = {"x": self.x, "t": self.t, "r": self.r, "algorithm": algorithm}
        if self.transport.streams is not None:
            state["streams"] = self.transport.streams.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Collective: flights already posted are completed and dropped.

        The next ones leave at once, so what is not in x, counters and frozen weights, comes first.
        """
        self._drop()
        with torch.no_grad():
            self.x.copy_(state["x"])
        self.t, self.r = int(state["t"]), int(state["r"])
        self.algorithm.load_state_dict(state["algorithm"], like=self.x)
        self._begun_at = -1 if state["algorithm"] else self.t
        if self.transport.streams is not None:
            self.transport.streams.load_state_dict(state.get("streams", {}), self.x.device)
        self.start()

    @property
    def at_boundary(self) -> bool:
        """True between two rounds: here a checkpoint fits."""
        return self.t == self._t_boundary

    # -- inside --------------------------------------------------------------------------------

    def _part(self, x: Tensor) -> str:
        """Which fragment of the model this is, as in 2/5; nothing for another tensor."""
        P = self.algorithm.P
        places = [(part.data_ptr(), part.shape) for part in self.cut(self.x, P)]
        place = (x.data_ptr(), x.shape)
        return f"{places.index(place) + 1}/{P}" if place in places else ""

    def _check_boundary(self, what: str) -> None:
        if not self.at_boundary:
            raise UserError(
                f"{what} fits only between two rounds (steps since the last one: "
                f"{self.t - self._t_boundary}): wait until agent.at_boundary is True"
            )

    def _drop(self) -> None:
        if self._schedule is not None:
            self._schedule.close()
        self.transport.drain()

    @torch.no_grad()
    def _resume(self, g: Tensor | None) -> None:
        assert self._schedule is not None
        increment_version(self.x)  # the training loop had control: it may have changed weights
        try:
            if g is None:
                next(self._schedule)
            else:
                self._schedule.send(g)
        except StopIteration:
            self.finished = True
        except BaseException:
            self._schedule = None  # Python ends a generator that raises: the next step must say so
            raise
        if self.algorithm.rebuilds_x:
            self._version_left = self.version()
        if self.trace is not None:
            self._gradient_start = self.trace.now()

    def _boundary(self) -> bool:
        self._t_boundary = self.t
        for hook in self.on_round:
            hook(self)
            increment_version(self.x)
        for observer in self.observers:
            observer(self)
        return self._stop
