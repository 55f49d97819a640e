"""The training loop, the same over MPI (one worker here) and in the simulator (all n here)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .config import RunOptions
from .control import Control
from .data import Shard, to_device
from .errors import Diverged
from .evaluation import Evaluator, MeanModel
from .schedule import Runner
from .tasks import Task, seed_step
from .transport.base import Pending

EXPLODED = 1e4  # a batch loss this many times the first one counts as diverged
EVALUATIONS = 20


@dataclass
class Worker:
    """One agent's model and data."""

    i: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    shard: Shard
    loss: float = math.nan


@dataclass
class Window:
    """What happened since the last row, summed over this process's agents."""

    loss: np.ndarray[Any, np.dtype[np.float64]]
    steps: int = 0
    start: float = 0.0


class Training:
    """Runs an algorithm on a task until `iterations`, and hands rows of metrics to `on_row`."""

    def __init__(
        self,
        config: RunOptions,
        task: Task,
        runner: Runner,
        workers: Sequence[Worker],
        iterations: int,
        *,
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
        on_step: Callable[[int], None] = lambda t: None,
    ) -> None:
        self.config, self.task, self.runner = config, task, runner
        self.workers, self.iterations = list(workers), iterations
        self.on_row, self.on_step = on_row, on_step
        self.control = Control(runner.transport)
        self.rows: list[dict[str, Any]] = []
        self.before_round: list[Callable[[], None]] = []
        """At every boundary before the next message leaves: checkpoints."""
        self.diverged = False
        first = self.workers[0]
        self.mean = MeanModel(task, first.model, config.buffers, config.bn == "recalibrate")
        self.evaluator = self._evaluator(config.eval_samples)
        tau = runner.algorithm.tau
        rounds = -(-iterations // tau)
        self.eval_every = config.eval_every or max(1, rounds // EVALUATIONS)
        runner.transport.measure_distance = True
        runner.on_round.append(self._boundary)
        self._first_loss = math.nan
        self._window = self._new_window()
        self._window_sums: Pending | None = None
        self._agreed_to_measure = False
        self._seen = -1
        self._start = runner.transport.now()

    def run(self) -> list[dict[str, Any]]:
        """All rows. Raises Diverged, on every rank alike, at a round boundary."""
        runner = self.runner
        while not runner.finished:
            for worker in self.workers:
                self._gradient(worker, runner.t)
            self._window.steps += 1
            runner.step()
            self.on_step(runner.t)
        self._finish_row()
        if self.diverged:
            raise Diverged(
                f"the loss is not finite or exploded near iteration {runner.t}: a smaller "
                "--alpha or more mixing may help"
            )
        if self.rows and self.rows[-1]["round"] == runner.r and self._covers_all():
            return self.rows
        self.evaluator = self._evaluator(None)  # the last row measures the whole test set
        self._start_row()
        self._finish_row()
        return self.rows

    # -- one step ------------------------------------------------------------------------------

    def _gradient(self, worker: Worker, k: int) -> None:
        """Leaves the gradient of agent i's k-th batch in the model's p.grad."""
        device = next(worker.model.parameters()).device
        batch = to_device(worker.shard.batch(k), device)
        seed_step(self.config.seed, worker.i, k)
        worker.optimizer.zero_grad()
        loss: Tensor = self.task.loss(worker.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(worker.model.parameters(), self.task.clip)
        worker.loss = loss.item()
        self._window.loss[worker.i] += worker.loss
        if math.isnan(self._first_loss):
            self._first_loss = worker.loss
        if not worker.loss <= EXPLODED * max(self._first_loss, 1.0):  # also true for NaN
            self.control.wish("diverged")

    # -- round boundaries ----------------------------------------------------------------------

    def _boundary(self, runner: Runner) -> None:
        if runner.r == self._seen or runner.r == 0:
            return  # the start, or where a resumed run takes up
        self._seen = runner.r
        for hook in self.before_round:
            hook()
        if not self.evaluator.idle and not self.evaluator.arrived:
            self.control.wish("not_ready")
        decided = self.control.boundary()
        self.decided(decided)
        self._move_row("not_ready" not in decided)
        if self.evaluator.idle and runner.r % self.eval_every == 0:
            self._start_row()
        if runner.t >= self.iterations:
            runner.stop()

    def decided(self, what: set[str]) -> None:
        """Act on a vote: the same set on every rank at the same boundary."""
        if "diverged" in what:
            self.diverged = True
            self.runner.stop()
        if "stop" in what:
            self.runner.stop()

    def _start_row(self) -> None:
        self.evaluator.start()
        self._window_sums = self._sum_window()
        self._window = self._new_window()
        self._agreed_to_measure = False

    def _move_row(self, all_ready: bool) -> None:
        """One step of the row under way: measure when all have the mean, then write."""
        row = self.evaluator.row
        if row is None:
            return
        if row.sums is not None:
            self._write_row()
        elif all_ready and self._agreed_to_measure:
            self.evaluator.measure()
        # The vote counted at this boundary was cast at the last one, where the row may be new.
        self._agreed_to_measure = True

    def _finish_row(self) -> None:
        row = self.evaluator.row
        if row is not None:
            if row.sums is None:
                self.evaluator.measure()
            self._write_row()

    def _write_row(self) -> None:
        assert self._window_sums is not None
        row = {**self.evaluator.finish(), **self._window_numbers(self._window_sums.result())}
        row["time"] -= self._start
        self.rows.append(row)
        self.on_row(row)

    # -- numbers of a window -------------------------------------------------------------------

    def _new_window(self) -> Window:
        self.runner.transport.records.clear()
        return Window(np.zeros(self.runner.transport.n), start=time.perf_counter())

    def _sum_window(self) -> Pending:
        window, transport = self._window, self.runner.transport
        records = list(transport.records)
        own = len(self.workers) / transport.n  # so that sums over ranks are means over agents
        distance = transport.distance
        tail = [
            own * sum(r.exposed for r in records),
            own * sum(r.transfer for r in records),
            own * len(records),
            0.0 if distance is None else float(torch.as_tensor(distance).sum()) / transport.n,
            own * (time.perf_counter() - window.start),
            own * window.steps,
        ]
        return transport.reduce(np.concatenate([window.loss, tail]), "sum")

    def _window_numbers(self, sums: np.ndarray[Any, Any]) -> dict[str, Any]:
        *losses, exposed, transfer, flights, distance, seconds, steps = sums.tolist()
        steps, flights = max(steps, 1.0), max(flights, 1.0)
        numbers: dict[str, Any] = {
            "batch_loss": float(np.mean(losses)) / steps,
            "agent_loss": [loss / steps for loss in losses],
            "consensus_op": distance,
            "step_s": seconds / steps,
            "samples_per_s": self.runner.transport.n * self.task.batch * steps / max(seconds, 1e-9),
            "transfer": transfer / flights,
            "exposed": exposed / flights,
            "hidden": 1 - exposed / transfer if transfer > 0 else None,
            "eval_s": self.evaluator.seconds,
        }
        return numbers

    # -- helpers -------------------------------------------------------------------------------

    def _evaluator(self, samples: int | None) -> Evaluator:
        agents = [worker.i for worker in self.workers]
        return Evaluator(self.runner, self.mean, agents, samples)

    def _covers_all(self) -> bool:
        return self.config.eval_samples >= len(self.task.test_set())
