"""What an agent does about a neighbour that is late: `--late reuse`.

In every round both ends of an edge use it, or neither does. An agent that is at the end of its
round, has waited `wait` and still lacks a neighbour's snapshot leaves the edge out and answers no.
One that has the snapshot has answered yes when it arrived, and cannot take that back. If either end
answers no, both move the edge's weight to themselves:

    w_ii <- w_ii + w_ij,    w_jj <- w_jj + w_ij,    w_ij <- 0

The W of that round is still symmetric and doubly stochastic, so the mean is kept exactly, round by
round. An edge is left out at most `staleness` times in a row; then both ends wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

NO_EDGES = (
    "--late reuse leaves out edges between neighbours, and this algorithm averages over all "
    "agents: use --late wait"
)
Times = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Late:
    wait: float = 1.0
    """How long an agent waits: seconds over MPI, else units of the virtual clock."""
    staleness: int = 1
    """How many rounds in a row an edge may be left out."""

    def __post_init__(self) -> None:
        if not self.wait >= 0:
            raise UserError(f"--late-wait must be at least 0, not {self.wait:g}")
        if self.staleness < 1:
            raise UserError(f"--staleness must be at least 1, not {self.staleness}")


@dataclass(frozen=True)
class Edges:
    """Both directions of a graph's edges, in the order of its CSR arrays: k is owner's side."""

    owner: Ints
    neighbour: Ints
    back: Ints
    """Where the same edge stands from the neighbour's side."""

    @staticmethod
    def of(indptr: Ints, indices: Ints) -> Edges:
        owner = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        return Edges(owner, indices, np.lexsort((owner, indices)))


def decide(edges: Edges, t: Times, through: Times, wait: float, must: Bools) -> tuple[Bools, Times]:
    """Which edges are used, and when each agent goes on, in virtual time.

    t: when each agent comes to the end of its round; through[k]: when the message from owner k is
    at neighbour k; must[k]: the edge was left out often enough.
    """
    i, j, back = edges.owner, edges.neighbour, edges.back
    arrived = through[back]  # the neighbour's message, at the owner
    lacks = (arrived > t[i] + wait) & ~must
    used = ~(lacks | lacks[back])
    own_no, their_no = t[i] + wait, t[j] + wait  # when each end would give up
    leave = np.where(
        used,
        np.maximum(arrived, through),  # and the answer that ours has arrived
        np.where(
            lacks & lacks[back], np.minimum(own_no, their_no), np.where(lacks, own_no, their_no)
        ),
    )
    ready = t.copy()
    np.maximum.at(ready, i, leave)
    return used, ready


@dataclass
class EdgeEnd:
    """One end of an edge over MPI: what it has heard and said, and what it concludes from that.

    Exchanges are numbered s = 0, 1, 2, ... For each s a snapshot comes from the other end, and both
    ends send one answer about the other's: 2 s + 1 is yes, 2 s is no.
    """

    s: int = -1
    """The exchange under way."""
    snapshots: int = 0
    """Received so far."""
    answered: int = 0
    """Answers sent so far."""
    answers: int = 0
    """Answers received so far."""
    neighbour_said_yes: bool = False
    """In its last answer."""
    used: bool | None = None
    """Whether both ends use the exchange under way; None until it is decided."""
    left_out: dict[tuple[int, int], int] = field(default_factory=dict)
    """(phase, fragment) -> rounds in a row in which it was left out; the same at both ends."""

    def begin(self) -> None:
        self.s += 1
        self.used = None

    @property
    def awaits_snapshot(self) -> bool:
        return self.snapshots <= self.s

    @property
    def awaits_answer(self) -> bool:
        return self.answers <= self.s

    def take_snapshot(self) -> int | None:
        """A snapshot has arrived: the answer to send, if it comes in time."""
        self.snapshots += 1
        in_time = self.snapshots == self.s + 1 and self.answered == self.s
        return self._answer(yes=True) if in_time else None

    def take_answer(self, answer: int) -> bool:
        """Whether it is about the exchange that it should be about."""
        about, yes = divmod(answer, 2)
        expected = about == self.answers
        self.neighbour_said_yes = bool(yes)
        self.answers += 1
        return expected

    def decide(self, expired: bool, what: tuple[int, int], staleness: int) -> int | None:
        """Come to a conclusion in `used` if that is possible: the answer to send, if it gives up.

        `expired`: it has waited long enough.
        """
        if self.used is not None:
            return None
        answered, heard = self.answered > self.s, self.answers > self.s
        refused = heard and not self.neighbour_said_yes
        must_wait = self.left_out.get(what, 0) >= staleness
        answer = None
        if not answered and (refused or (expired and not must_wait)):
            answer = self._answer(yes=False)
            self.used = False
        elif answered and heard:
            self.used = not refused
        if self.used is not None:
            self.left_out[what] = 0 if self.used else self.left_out.get(what, 0) + 1
        return answer

    def _answer(self, yes: bool) -> int:
        self.answered += 1
        return 2 * self.s + yes
