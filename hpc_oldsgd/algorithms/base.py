"""What an algorithm is: options, state, and a schedule one can read.

`g = yield` is where a fresh local gradient at x arrives; everything else is straight-line code,
so what overlaps with what is the order of the lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from typing_extensions import Self

from ..errors import UserError

if TYPE_CHECKING:
    from ..runtime.runner import Runner, Schedule
    from ..topology import Topology


@dataclass
class Algorithm:
    """Base of all: its dataclass fields are its options, those marked `state()` its state."""

    tau: int = 5
    """Local steps between two mixings; auto for the smallest that hides the messages, auto:2-40
    within bounds."""

    name: ClassVar[str] = ""
    reads_gradient: ClassVar[bool] = True
    """False if the schedule only passes g to `descend`: then no flat copy of it is made."""
    rebuilds_x: ClassVar[bool] = False
    """True if the schedule replaces x by what was sent less alpha times the gradients. Then only
    plain SGD may change x inside a round."""
    exchanged: ClassVar[int] = 1
    """Tensors as long as x that neighbours exchange in a round: 0 if all goes by all-reduce."""

    @property
    def P(self) -> int:
        """Fragments in which x travels in a round (fragments.py)."""
        return 1

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise UserError(f"tau must be at least 1, not {self.tau}")
        if int(self.tau) != self.tau:
            raise UserError(f"tau must be a whole number, not {self.tau}")

    def with_tau(self, tau: int) -> Self:
        """The same algorithm with another number of local steps."""
        return replace(self, tau=tau)

    def check(self, topology: Topology) -> None:
        """Raises UserError where it would not work on this graph."""

    def schedule(self, agent: Runner) -> Schedule:
        raise NotImplementedError(f"{type(self).__name__} has no schedule")

    def init(self, **start: Tensor) -> None:
        """Set the state that is not there yet; a resumed run has it already."""
        for name, value in start.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def state_dict(self) -> dict[str, Tensor]:
        names = [f.name for f in fields(self) if not f.init]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def load_state_dict(self, state: dict[str, Tensor], like: Tensor) -> None:
        for name in [f.name for f in fields(self) if not f.init]:
            if name in state:
                value = state[name]  # a number stays where the schedule reads it: no wait for a GPU
                setattr(self, name, value.to(like.device if value.dim() else "cpu", copy=True))
            elif hasattr(self, name):
                delattr(self, name)


def state() -> Any:
    """Marks a dataclass field as state: model-sized, kept over rounds, saved in checkpoints."""
    return field(init=False, repr=False, compare=False)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
