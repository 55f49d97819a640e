"""The training loop, the same over MPI (one worker here) and in the simulator (all n here)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..algorithms.fragments import Fragmented
from ..checkpoints.store import folder_of
from ..checkpoints.writer import Checkpoints
from ..data import Shard, to_device
from ..errors import Diverged
from ..runtime.runner import Runner
from ..runtime.sgd import Optimizer
from ..runtime.votes import Control
from ..simulation.slowdown import Slowdown
from ..simulation.vmap_gradients import VmapGradients
from ..tasks import Task, seed_step
from ..transport.device import device_of
from ..transport.late_number import LateNumber
from .evaluation import MeanModel
from .losses import Losses
from .metric_rows import Rows
from .options import RunOptions
from .signals import Inbox
from .target import best, met
from .warmup import Warmup

EXPLODED = 1e4  # a batch loss this many times the first one counts as diverged
EVALUATIONS = 20


@dataclass
class Worker:
    """One agent's model and data."""

    i: int
    model: nn.Module
    optimizer: Optimizer
    shard: Shard
    loss: float = math.nan


def backward(task: Task, model: nn.Module, shard: Shard, seed: int, k: int) -> LateNumber:
    """Adds the gradient of the k-th batch to the model's p.grad; the loss."""
    batch = to_device(shard.batch(k), next(model.parameters()).device)
    seed_step(seed, shard.i, k)
    loss: Tensor = task.loss(model, batch)
    loss.backward()
    if task.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
    return LateNumber(loss)


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
        control: Control | None = None,
        checkpoints: Checkpoints | None = None,
        rows: Sequence[dict[str, Any]] = (),
        data_of: int | None = None,
        vmap: VmapGradients | None = None,
        slowdown: Slowdown | None = None,
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
        on_step: Callable[[int], None] = lambda t: None,
        say: Callable[[str], None] = lambda text: None,
        signals: Inbox | None = None,
    ) -> None:
        """`rows`: those of the run it goes on from; `data_of`: agents the data was dealt to;
        `vmap` takes all gradients in one pass; `slowdown` makes them longer."""
        self.config, self.task, self.runner = config, task, runner
        self.workers, self.iterations = list(workers), iterations
        self.on_row, self.on_step, self.say = on_row, on_step, say
        self.signals = signals or Inbox()
        self.control = control or Control(runner.transport)
        self.checkpoints = checkpoints
        self.rows = list(rows)
        self.data_of = data_of or runner.transport.n
        self.vmap, self.slowdown = vmap, slowdown
        self.diverged_at: int | None = None  # the iteration
        self.stopped = False
        """A signal ended the run before its time."""
        self.reached = False
        """A row met the target, on every rank alike."""
        self.best: float | None = None
        """Of all rows so far, the primary number closest to the target or furthest beyond it."""
        self.mean = MeanModel(task, workers[0].model, config.buffers, config.bn == "recalibrate")
        self.metrics = Rows(
            config, runner, self.mean, self._models(), self.control.lag, self._write
        )
        self.set_tau(runner.algorithm.tau)
        self.warmup = Warmup([worker.optimizer for worker in workers], config.warmup)
        self.warmup.before_round(runner.t, runner.algorithm.tau)
        runner.transport.measure_distance = True
        runner.observers.append(self._boundary)
        self._first_loss = math.nan
        self._device = next(workers[0].model.parameters()).device
        self._losses = Losses(self._device, self._take_loss)
        self.control.late = self._losses.late
        self._resumed_at = -1
        self._start_saved = False

    def run(self) -> list[dict[str, Any]]:
        """The rows. Raises Diverged, on every rank alike, at a round boundary or at the end."""
        runner, checkpoints = self.runner, self.checkpoints
        if runner.t == 0:  # an Agent has left its first boundary before it comes here
            self._save_start()
        while not runner.finished:
            self.gradients()
            runner.step()
            self.on_step(runner.t)
        if self.diverged_at is not None:
            raise Diverged(self._why_diverged())
        if checkpoints is not None:  # first: measuring the whole test set may take long
            with runner.transport.status.doing("checkpointing"):
                checkpoints.settle()
            self._pass_on_messages()
        if not self.stopped:
            self.metrics.last()
        if checkpoints is not None:
            checkpoints.finish()
        runner.transport.status.set("ending")
        if not self.stopped:
            self._check_closing(self.rows[-1])
        return self.rows

    def set_tau(self, tau: int, fragments: int | None = None) -> None:
        """For the rounds to come; at a boundary, on all ranks alike."""
        algorithm = self.runner.algorithm
        algorithm.tau = tau
        if fragments is not None and isinstance(algorithm, Fragmented):
            algorithm.fragments = fragments
        rounds = -(-self.iterations // tau)
        self.eval_every = self.config.eval_every or max(1, rounds // EVALUATIONS)

    # -- one step ------------------------------------------------------------------------------

    def gradients(self) -> None:
        """Of every agent here, at its x and on its next batch."""
        start = time.perf_counter()
        self._gradients(self.runner.t)
        if self.slowdown is not None:
            device_of(self._device).synchronize()
            self.slowdown.after(time.perf_counter() - start)
        self.metrics.window.steps += 1

    def backward(self, worker: Worker, k: int) -> LateNumber:
        """Leaves the gradient of agent i's k-th batch in the model's p.grad; the loss."""
        # Where the schedule reads a flat gradient, p.grad are views of it: kept, they save a copy.
        worker.optimizer.zero_grad(set_to_none=not self.runner.algorithm.reads_gradient)
        return backward(self.task, worker.model, worker.shard, self.config.seed, k)

    def _gradients(self, k: int) -> None:
        losses = None if self.vmap is None else self.vmap.backward(k)
        for j, worker in enumerate(self.workers):
            self._losses.note(j, self.backward(worker, k) if losses is None else losses[j])

    def _take_loss(self, j: int, loss: float) -> None:
        worker = self.workers[j]
        worker.loss = loss
        self.metrics.window.loss[worker.i] += worker.loss
        if math.isnan(self._first_loss):
            self._first_loss = worker.loss
        if not worker.loss <= EXPLODED * max(self._first_loss, 1.0):  # also true for NaN
            self.control.wish("diverged")

    # -- round boundaries ----------------------------------------------------------------------

    def _boundary(self, runner: Runner) -> None:
        status = runner.transport.status
        status.round = runner.r
        status.set("computing")
        self.warmup.before_round(runner.t, runner.algorithm.tau)
        if runner.r == 0:
            self._save_start()
            return
        self.metrics.window.absorb(runner.transport)
        due = runner.r % self.eval_every == 0
        ending = runner.t >= self.iterations or self.reached
        self._losses.boundary(read_all=due or ending)
        decided = self._vote()
        if "diverged" in decided:
            self._diverged(runner)
            return
        self.metrics.move("not_ready" not in decided)
        fresh = runner.r != self._resumed_at  # there it is saved already
        checkpoints = self.checkpoints if fresh else None
        save = checkpoints is not None and checkpoints.wanted(runner.r, decided)
        stop = fresh and "stop" in decided
        if due or save or stop:
            self.metrics.finish()  # long here, unless rows follow each other within a few rounds
        ending = ending or self.reached  # a row may have met the target just now
        if (ending or stop) and self._losses.late:  # a last vote, on the losses read last
            self._losses.read_all()
            self.control.boundary()
        # Nobody counts the open votes later, and the last round's losses are among them.
        if (ending or stop) and "diverged" in self.control.settle():
            self._diverged(runner)
            return
        self.stopped = stop and not ending
        if ending or stop:
            self.metrics.finish()
            runner.stop()
        if checkpoints is not None:
            if save or ending or stop:
                self._save(checkpoints)
            self._pass_on_messages()
        if due and not (ending or stop):
            self.metrics.start()

    def _vote(self) -> set[str]:
        """What all agents asked for a round ago: the same set on every rank."""
        for what in self.signals.take():
            self.control.wish(what)
        if self.metrics.on_its_way:
            self.control.wish("not_ready")
        if self.checkpoints is not None:
            self.checkpoints.cast_wishes()
        return self.control.boundary()

    def _save(self, checkpoints: Checkpoints) -> None:
        """Before this boundary's row starts: a resumed run takes up right here."""
        self._losses.read_all()
        runner, start = self.runner, time.perf_counter()
        with runner.transport.status.doing("checkpointing"):
            checkpoints.save(runner.r, runner.t, self.state_dict())
        self.metrics.window.pause(time.perf_counter() - start)

    def _save_start(self) -> None:
        """Whatever happens in the first rounds, there is something to go on from."""
        if self.checkpoints is not None and not self._start_saved and self._resumed_at != 0:
            self._start_saved = True
            self._save(self.checkpoints)

    def _pass_on_messages(self) -> None:
        assert self.checkpoints is not None
        while self.checkpoints.messages:
            self.say(self.checkpoints.messages.pop(0))

    def _diverged(self, runner: Runner) -> None:
        self.diverged_at = runner.t
        self.metrics.finish()
        if self.checkpoints is not None:
            self.checkpoints.diverged(runner.r)
            self._pass_on_messages()
        runner.stop()

    def _why_diverged(self) -> str:
        return (
            f"the loss is not finite or exploded near iteration {self.diverged_at}: a smaller "
            f"--alpha or more mixing may help; {self._last_checkpoint()}"
        )

    def _last_checkpoint(self) -> str:
        last = None if self.checkpoints is None else self.checkpoints.last
        if last is None:
            return "there is no checkpoint before it"
        of_now = last.name == folder_of(last, self.runner.r).name
        return f"the last {'' if of_now else 'good '}checkpoint is {last}"

    def _check_closing(self, row: dict[str, Any]) -> None:
        """No gradient is taken at the last models: only this row tells what they are worth."""
        loss = row["train_loss"]
        if loss <= EXPLODED * max(1.0, row["batch_loss"]) and loss < math.inf:
            return
        if self.checkpoints is not None:
            self.checkpoints.reject(row["round"])
        raise Diverged(
            f"the mean model's loss is {loss:g} after the last iteration, {row['iteration']}: a "
            f"smaller --alpha or more mixing may help; {self._last_checkpoint()}"
        )

    def _write(self, row: dict[str, Any]) -> None:
        name, direction = self.task.primary
        self.best = best((self.best, row.get(name)), direction)
        self.reached = met(self.config.target, self.best, direction)
        self.rows.append(row)
        self.on_row(row)

    # -- after the loss of an agent ------------------------------------------------------------

    def take_data(self, shard: Shard, of: int) -> None:
        """This process's agent goes on with another part of the data, dealt to `of` agents."""
        self.workers[0].shard, self.data_of = shard, of

    def regroup(self, i: int, rows: Sequence[dict[str, Any]]) -> None:
        """This process's agent is number i of fewer; whatever the dead had a part in is dropped."""
        self.rows[:] = rows
        self.workers[0].i = i
        self.control.drop()
        self._losses.drop()
        self._resumed_at, self._start_saved = -1, False
        self.metrics.regroup(self._models())

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the run at a boundary, before the boundary's own row."""
        transport = self.runner.transport
        return {
            "runner": self.runner.state_dict(),
            "models": [self._outside(worker) for worker in self.workers],
            "frozen": self._frozen(),
            "distance": transport.distance,
            "first_loss": self._first_loss,
            "tau": self.runner.algorithm.tau,
            "fragments": self.runner.algorithm.P,
            "best": self.best,
            **self.metrics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], save: bool = False) -> None:
        """Go on from a state, and save it again here if asked. Collective; starts the runner."""
        transport, runner = self.runner.transport, self.runner
        transport.drain()
        transport.records.clear()  # what was posted before belongs to no run
        for worker, tensors in zip(self.workers, state["models"], strict=True):
            own = self._outside(worker)
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self.metrics.load_state_dict(state)
        transport.distance = state["distance"]
        self._first_loss = state["first_loss"]
        chosen = state.get("fragments") if "fragments" in self.config.choice else None
        self.set_tau(state.get("tau", runner.algorithm.tau), chosen)
        self.best = state.get("best")
        self.reached = met(self.config.target, self.best, self.task.primary[1])
        self._resumed_at = -1 if save else int(state["runner"]["r"])
        if save and self.checkpoints is not None:
            self.checkpoints.ask()
        runner.load_state_dict(state["runner"])
        self.metrics.begun = transport.now() - state["elapsed"]

    def _outside(self, worker: Worker) -> dict[str, Tensor]:
        """Buffers that are not in x: counters, and BatchNorm's when they are local."""
        inside = {slot.name for slot in self.mean.flat.slots}
        return {k: b for k, b in worker.model.named_buffers() if k not in inside}

    def _frozen(self) -> dict[str, Tensor]:
        """Agent 0's, for the exported model; they never change."""
        first = self.workers[0]
        frozen = [(k, p) for k, p in first.model.named_parameters() if not p.requires_grad]
        return dict(frozen) if first.i == 0 else {}

    def _models(self) -> dict[int, nn.Module]:
        return {worker.i: worker.model for worker in self.workers}
