"""Rows of metrics, made while the agents go on: started at one boundary, written rounds later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..runtime.runner import Runner
from ..transport.base import Pending
from .evaluation import Evaluator, MeanModel
from .options import RunOptions
from .window import Window


class Rows:
    """At most one row is under way; `write` gets it when its numbers have come from everywhere."""

    def __init__(
        self,
        config: RunOptions,
        runner: Runner,
        mean: MeanModel,
        models: Mapping[int, nn.Module],
        lag: int,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """`models` are the agents of this process; a vote is counted `lag` boundaries later."""
        self.config, self.runner, self.mean, self.lag, self.write = config, runner, mean, lag, write
        self.begun = runner.transport.now()
        """The run's beginning on the transport's clock."""
        self.eval_seconds = 0.0
        self.regroup(models)

    def regroup(self, models: Mapping[int, nn.Module]) -> None:
        """From now on these agents; the row under way and what was counted for it are dropped."""
        self.models = models
        self.window = self._new_window()
        self._sums: Pending | None = None
        self._measure_on(self.config.eval_samples)

    @property
    def idle(self) -> bool:
        return self._evaluator.row is None

    @property
    def on_its_way(self) -> bool:
        """The row's mean model has not arrived here."""
        return not self.idle and not self._evaluator.arrived

    def start(self) -> None:
        self._evaluator.start()
        self._sums = self.window.sums(self.runner.transport, len(self.models))
        self._tau = self.runner.algorithm.tau
        self.window = self._new_window()
        self._votes = 0

    def move(self, all_ready: bool) -> None:
        """One step of the row under way: measure when all have the mean, then write."""
        row = self._evaluator.row
        if row is None:
            return
        if row.sums is not None:
            self._write()
        elif all_ready and self._votes >= self.lag:
            self._measure()
        # The vote counted at this boundary was cast `lag` ago, where there may have been no row.
        self._votes += 1

    def finish(self) -> None:
        """Wait for the row under way, if there is one. Collective."""
        row = self._evaluator.row
        if row is not None:
            if row.sums is None:
                self._measure()
            self._write()

    def last(self) -> None:
        """A row for the run's end, over the whole test set unless told otherwise. Collective."""
        if self.config.final_test:
            self._measure_on(None)
        self.start()
        self.finish()

    def state_dict(self) -> dict[str, Any]:
        assert self.idle
        return {
            "window": self.window.state_dict(),
            "elapsed": self.runner.transport.now() - self.begun,
            "eval_s": self.eval_seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.window = self._new_window()
        self.window.load_state_dict(state["window"])
        self.eval_seconds = state["eval_s"]

    def _measure_on(self, test_samples: int | None) -> None:
        samples = self.config.eval_samples
        self._evaluator = Evaluator(self.runner, self.mean, self.models, samples, test_samples)

    def _measure(self) -> None:
        start = time.perf_counter()
        with self.runner.transport.status.doing("evaluating"):
            self._evaluator.measure()
        took = time.perf_counter() - start
        self.eval_seconds += took
        self.window.pause(took)

    def _write(self) -> None:
        assert self._sums is not None
        with self.runner.transport.status.doing("evaluating"):
            row = self._evaluator.finish()
        row.update(self.window.numbers(self._sums.result(), self.mean.task.batch))
        row["time"] -= self.begun
        row["eval_s"] = self.eval_seconds
        row["tau"] = self._tau
        row["agents"] = self.runner.transport.n
        self.write(row)

    def _new_window(self) -> Window:
        self.runner.transport.records.clear()
        return Window([0.0] * self.runner.transport.n)
