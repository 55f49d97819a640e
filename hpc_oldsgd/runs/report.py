"""What a run tells: messages and rows on the console and, in one process, in the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cli.console import Console, summary_lines
from ..tasks import Task
from ..training import target
from ..training.whole_run import totals, training_s
from ..transport.heartbeat import clear
from .folder import RunFolder


class Report:
    def __init__(self, console: Console, folder: RunFolder | None) -> None:
        """`folder` in the process that writes it, which may be another one after a death."""
        self.console, self._folder = console, folder
        self.unsaved: dict[str, str] = {}
        """Files of the result that could not be written, and why."""

    def start(self, headline: str, iterations: int) -> None:
        self.console.print(f"{self.console.prog}: {headline}")
        self.console.start(iterations)

    def config(self, content: Callable[[], dict[str, Any]]) -> None:
        """config.json once more, with what has been measured since the start."""
        if self._folder is not None:
            try:
                self._folder.write("config.json", content())
            except OSError as error:
                self.console.warn(f"config.json: {error.strerror}")

    def row(self, row: dict[str, Any]) -> None:
        self.console.row(row)
        if self._folder is not None:
            self._folder.row(row)
            self.console.warn(self._folder.problem)

    def sync(self) -> None:
        """The rows so far outlive a power cut. From any thread."""
        if self._folder is not None:
            self._folder.sync()

    def take_over(self, folder: RunFolder, iterations: int) -> None:
        """This process writes and shows the run from now on: the one that did has died."""
        if self._folder is None:
            self.console.shown = True
            self.console.start(iterations)
        else:
            self._folder.close(run_goes_on=True)
        self._folder = folder

    def summary(self, content: dict[str, Any]) -> None:
        if self._folder is not None:
            self.unsaved = self._folder.summary(content)
            for name, why in self.unsaved.items():
                self.console.warn(f"{name}: {why}")
            self.console.print(summary_lines(content, self._folder.path))

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            clear(self._folder.path)  # nobody waits any more
            self._folder = None


def summarise(rows: list[dict[str, Any]], task: Task, title: str, time_unit: str) -> dict[str, Any]:
    """The last row, with what only the whole run tells."""
    last = dict(rows[-1])
    last.pop("agent_loss", None)
    name, direction = task.primary
    values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
    return {
        "title": title,
        **last,
        "primary": name,
        "best": target.best(values, direction),
        **totals(rows),
        "time_unit": time_unit,
    }


def wall_s(rows: list[dict[str, Any]]) -> float:
    """What a run had taken up to its last row, by a wall clock; in the simulator too."""
    return (training_s(rows)[-1] or 0.0) + rows[-1].get("eval_s", 0.0) if rows else 0.0
