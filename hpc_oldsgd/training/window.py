"""What happened between two rows of metrics, summed over the agents of this process."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ..transport.base import Pending, Transport
from .whole_run import hidden


@dataclass
class Window:
    loss: list[float]
    """Sum of the batch losses of each agent; 0 for those of other processes."""
    steps: int = 0
    seconds: float = 0.0
    """Less what was spent on measuring; without the part since `start`."""
    exposed: float = 0.0
    transfer: float = 0.0
    flights: int = 0
    left_out: float = 0.0
    start: float = field(default_factory=lambda: time.perf_counter())

    def absorb(self, transport: Transport) -> None:
        """Take the finished flights; one by one, so that a resumed sum is the same sum."""
        transport.settle_times(False)
        while transport.known_records:
            record = transport.known_records.popleft()
            self.exposed += record.exposed
            self.transfer += record.transfer
            self.flights += 1
            self.left_out += record.left_out

    def pause(self, seconds: float) -> None:
        self.seconds -= seconds

    def sums(self, transport: Transport, agents: int) -> Pending:
        """On their way to every rank: the losses, then what `numbers` unpacks."""
        own = agents / transport.n  # so that sums over ranks are means over agents
        distance = transport.distance
        apart = 0.0 if distance is None else float(torch.as_tensor(distance).sum()) / transport.n
        seconds = self.seconds + time.perf_counter() - self.start
        tail = [self.exposed, self.transfer, self.flights, self.left_out, seconds, self.steps]
        values = np.array([*self.loss, apart, *(own * value for value in tail)])
        return transport.reduce(values, "sum")

    def numbers(self, sums: np.ndarray[Any, Any], batch: int) -> dict[str, Any]:
        """The columns of a row; n is the number of losses."""
        n = len(self.loss)
        losses = sums[:n].tolist()
        apart, exposed, transfer, flights, left_out, seconds, steps = sums[n:].tolist()
        per_step, per_flight = max(steps, 1.0), max(flights, 1.0)
        return {
            "batch_loss": float(np.mean(losses)) / per_step,
            "agent_loss": [loss / per_step for loss in losses],
            "consensus_op": apart,
            "step_s": seconds / per_step,
            "samples_per_s": n * batch * steps / max(seconds, 1e-9),
            "transfer": transfer / per_flight,
            "exposed": exposed / per_flight,
            "hidden": hidden(exposed, transfer) if n > 1 else None,
            "left_out": left_out / per_flight,
        }

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        state["seconds"] += time.perf_counter() - state.pop("start")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
