"""The training loop, the same over MPI (one worker here) and in the simulator (all n here)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoints
from .config import RunOptions
from .control import Control
from .data import Shard, to_device
from .errors import Diverged, UserError
from .evaluation import Evaluator, MeanModel
from .schedule import Runner
from .signals import Inbox
from .tasks import Task, seed_step
from .transport.base import Pending
from .window import Window

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
        say: Callable[[str], None] = lambda text: None,
        signals: Inbox | None = None,
    ) -> None:
        self.config, self.task, self.runner = config, task, runner
        self.workers, self.iterations = list(workers), iterations
        self.on_row, self.on_step, self.say = on_row, on_step, say
        self.signals = signals or Inbox()
        self.control = Control(runner.transport)
        self.checkpoints: Checkpoints | None = None
        self.rows: list[dict[str, Any]] = []
        self.diverged_at: int | None = None  # the iteration
        self.stopped = False
        """A signal ended the run before its time."""
        self.mean = MeanModel(task, workers[0].model, config.buffers, config.bn == "recalibrate")
        self.evaluator = self._evaluator(config.eval_samples)
        rounds = -(-iterations // runner.algorithm.tau)
        self.eval_every = config.eval_every or max(1, rounds // EVALUATIONS)
        runner.transport.measure_distance = True
        runner.on_round.append(self._boundary)
        self._first_loss = math.nan
        self._window = self._new_window()
        self._window_sums: Pending | None = None
        self._agreed_to_measure = False
        self._resumed_at = -1
        self._start = runner.transport.now()

    def run(self) -> list[dict[str, Any]]:
        """The rows. Raises Diverged, on every rank alike, at a round boundary."""
        runner = self.runner
        while not runner.finished:
            for worker in self.workers:
                self._gradient(worker, runner.t)
            self._window.steps += 1
            runner.step()
            self.on_step(runner.t)
        if self.diverged_at is not None:
            raise Diverged(self._epitaph())
        if not self.stopped:
            if self.config.final_test:
                self.evaluator = self._evaluator(None)
            self._start_row()
            self._finish_row()
        if self.checkpoints is not None:
            self.checkpoints.finish()
            self._pass_on_messages()
        return self.rows

    # -- one step ------------------------------------------------------------------------------

    def _gradient(self, worker: Worker, k: int) -> None:
        """Leaves the gradient of agent i's k-th batch in the model's p.grad."""
        device = next(worker.model.parameters()).device
        batch = to_device(worker.shard.batch(k), device)
        seed_step(self.config.seed, worker.i, k)
        # Where the schedule reads a flat gradient, p.grad are views of it: kept, they save a copy.
        worker.optimizer.zero_grad(set_to_none=not self.runner.algorithm.reads_gradient)
        loss: Tensor = self.task.loss(worker.model, batch)
        loss.backward()
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
        if runner.r == 0:
            return
        self._window.absorb(runner.transport)
        decided = self._vote()
        if "diverged" in decided:
            self._diverged(runner)
            return
        self._move_row("not_ready" not in decided)
        ending = runner.t >= self.iterations
        due = runner.r % self.eval_every == 0
        if runner.r != self._resumed_at:  # there it is saved already
            self.stopped = "stop" in decided and not ending
            self._checkpoint(decided, last=ending or self.stopped)
        if due or ending or self.stopped:
            self._finish_row()  # long here, unless rows follow each other within a few rounds
        if ending or self.stopped:
            runner.stop()
        elif due:
            self._start_row()

    def _vote(self) -> set[str]:
        """What all agents asked for a round ago: the same set on every rank."""
        for what in self.signals.take():
            self.control.wish(what)
        if not self.evaluator.idle and not self.evaluator.arrived:
            self.control.wish("not_ready")
        if self.checkpoints is not None:
            self.checkpoints.cast_wishes()
        return self.control.boundary()

    def _checkpoint(self, decided: set[str], last: bool) -> None:
        """Before this boundary's row starts: a resumed run takes up right here."""
        keeper, runner = self.checkpoints, self.runner
        if keeper is None:
            return
        if keeper.wanted(runner.r, decided, last):
            self._finish_row()  # belongs to the rounds before
            start = time.perf_counter()
            keeper.save(runner.r, runner.t, self.state_dict())
            self._window.pause(time.perf_counter() - start)
        self._pass_on_messages()

    def _pass_on_messages(self) -> None:
        assert self.checkpoints is not None
        while self.checkpoints.messages:
            self.say(self.checkpoints.messages.pop(0))

    def _diverged(self, runner: Runner) -> None:
        self.diverged_at = runner.t
        self._finish_row()
        if self.checkpoints is not None:
            self.checkpoints.diverged(runner.r)
            self._pass_on_messages()
        runner.stop()

    def _epitaph(self) -> str:
        last = None if self.checkpoints is None else self.checkpoints.last
        return (
            f"the loss is not finite or exploded near iteration {self.diverged_at}: a smaller "
            "--alpha or more mixing may help; "
            + (
                f"the last good checkpoint is {last}"
                if last
                else "there is no checkpoint before it"
            )
        )

    # -- rows of metrics -----------------------------------------------------------------------

    def _start_row(self) -> None:
        self.evaluator.start()
        self._window_sums = self._window.sums(self.runner.transport, len(self.workers))
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
            self._measure()
        # The vote counted at this boundary was cast at the last one, where the row may be new.
        self._agreed_to_measure = True

    def _finish_row(self) -> None:
        row = self.evaluator.row
        if row is not None:
            if row.sums is None:
                self._measure()
            self._write_row()

    def _measure(self) -> None:
        start = time.perf_counter()
        self.evaluator.measure()
        self._window.pause(time.perf_counter() - start)

    def _write_row(self) -> None:
        assert self._window_sums is not None
        row = self.evaluator.finish()
        row.update(self._window.numbers(self._window_sums.result(), self.task.batch))
        row["time"] -= self._start
        row["eval_s"] = self.evaluator.seconds
        self.rows.append(row)
        self.on_row(row)

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the run at a boundary, before the boundary's own row."""
        assert self.evaluator.idle
        transport = self.runner.transport
        return {
            "runner": self.runner.state_dict(),
            "models": [self._outside(worker) for worker in self.workers],
            "frozen": self._frozen(),
            "window": self._window.state_dict(),
            "distance": transport.distance,
            "first_loss": self._first_loss,
            "elapsed": transport.now() - self._start,
            "eval_s": self.evaluator.seconds,
        }

    def load_state_dict(self, state: dict[str, Any], save: bool = False) -> None:
        """Go on from a state, and save it again here if asked. Collective; starts the runner."""
        transport, runner = self.runner.transport, self.runner
        transport.drain()
        transport.records.clear()  # what was posted before belongs to no run
        for name, tensor in self._frozen().items():
            if not torch.equal(tensor.cpu(), state["frozen"][name]):
                raise UserError(
                    f"the frozen {name} is not the checkpoint's: another pretrained model?"
                )
        for worker, tensors in zip(self.workers, state["models"], strict=True):
            own = self._outside(worker)
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self._window = self._new_window()
        self._window.load_state_dict(state["window"])
        transport.distance = state["distance"]
        self._first_loss = state["first_loss"]
        self.evaluator.seconds = state["eval_s"]
        self._resumed_at = -1 if save else int(state["runner"]["r"])
        runner.load_state_dict(state["runner"])
        self._start = transport.now() - state["elapsed"]

    def _outside(self, worker: Worker) -> dict[str, Tensor]:
        """Buffers that are not in x: counters, and BatchNorm's when they are local."""
        inside = {slot.name for slot in self.mean.flat.slots}
        return {k: b for k, b in worker.model.named_buffers() if k not in inside}

    def _frozen(self) -> dict[str, Tensor]:
        """Agent 0's, for the exported model; they never change."""
        first = self.workers[0]
        frozen = [(k, p) for k, p in first.model.named_parameters() if not p.requires_grad]
        return dict(frozen) if first.i == 0 else {}

    # -- helpers -------------------------------------------------------------------------------

    def _new_window(self) -> Window:
        self.runner.transport.records.clear()
        return Window.empty(self.runner.transport.n)

    def _evaluator(self, test_samples: int | None) -> Evaluator:
        models = {worker.i: worker.model for worker in self.workers}
        made = Evaluator(self.runner, self.mean, models, self.config.eval_samples, test_samples)
        made.seconds = self.evaluator.seconds if hasattr(self, "evaluator") else 0.0
        return made
