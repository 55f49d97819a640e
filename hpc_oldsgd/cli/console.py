"""What a command line shows of a run: a bar on a terminal, plain lines elsewhere, a summary."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

LINES = 10  # where there is no terminal


class Console:
    """Silent unless `shown`: under MPI only rank 0 prints."""

    def __init__(self, prog: str, shown: bool = True) -> None:
        self.prog, self.shown = prog, shown
        self._terminal = sys.stderr.isatty()
        self._total = 0
        self._bar = tqdm(disable=True)
        self._warned: set[str] = set()
        self._start_s = perf_counter()
        self._next_line = 0.0

    def start(self, total: int) -> None:
        self._total, self._start_s = total, perf_counter()
        hidden = not (self.shown and self._terminal)
        self._bar = tqdm(total=total, unit="it", disable=hidden, dynamic_ncols=True)

    def go_on(self, seconds: float) -> None:
        """The run had taken so long before this start: its clock goes on from there."""
        self._start_s -= seconds

    def step(self, t: int) -> None:
        self._bar.update(t - self._bar.n if self._bar.n is not None else 0)

    def row(self, row: dict[str, Any]) -> None:
        text = describe(row)
        if not self.shown:
            return
        if self._terminal:
            self._bar.set_postfix_str(text)
        elif row["iteration"] >= self._next_line:
            elapsed = perf_counter() - self._start_s
            print(
                f"[{elapsed:6.1f} s] iteration {row['iteration']}/{self._total}  {text}", flush=True
            )
            self._next_line = row["iteration"] + self._total / LINES

    def print(self, text: str) -> None:
        """To standard output, as the result of the command."""
        if self.shown:
            print(text, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self.shown:
            tqdm.write(f"{self.prog}: {text}", file=sys.stderr)
            sys.stderr.flush()

    def warn(self, problem: str) -> None:
        """Once for each problem."""
        if problem and problem not in self._warned:
            self._warned.add(problem)
            self.say(f"warning: {problem}; the run goes on")

    def close(self) -> None:
        self._bar.close()


def describe(row: dict[str, Any]) -> str:
    parts = [f"loss {row['train_loss']:.4f}"]
    if "test_accuracy" in row:
        parts.append(f"test accuracy {row['test_accuracy']:.2%}")
    if "test_perplexity" in row:
        parts.append(f"test perplexity {row['test_perplexity']:.1f}")
    parts.append(f"consensus {row['consensus']:.2e}")
    return "  ".join(parts)


def summary_lines(summary: dict[str, Any], folder: Path) -> str:
    """The closing table of a run."""
    lines = [("run", summary["title"])]
    if "test_accuracy" in summary:
        lines.append(("test accuracy of the mean model", f"{summary['test_accuracy']:.2%}"))
    if "test_perplexity" in summary:
        lines.append(("test perplexity of the mean model", f"{summary['test_perplexity']:.2f}"))
    lines.append(("training loss of the mean model", f"{summary['train_loss']:.4f}"))
    lines.append(("consensus distance", f"{summary['consensus']:.3e}"))
    unit = summary["time_unit"]
    time = f"{summary['time']:.1f} {unit} for {summary['iteration']} iterations"
    if unit == "s" and summary.get("training_s") is not None:
        time += f"; {summary['training_s']:.1f} s without measuring and saving"
    lines.append(("time", time))
    lines.append(("step", f"{summary['step_s'] * 1e3:.2f} ms of wall time"))
    if summary["hidden"] is None:
        lines.append(("communication", "none"))
    else:
        scale, short = (1e3, "ms") if unit == "s" else (1.0, "units")
        transfer, exposed = (f"{summary[k] * scale:.2f} {short}" for k in ("transfer", "exposed"))
        lines.append(("transfer", f"{transfer} per message, {exposed} of it waited for"))
        lines.append(("hidden", f"{summary['hidden']:.1%} of the communication"))
    if lost := summary.get("lost"):
        gone = [f"rank {one['rank']} ({one['host']}) in round {one['round']}" for one in lost]
        lines.append(("lost agents", ", ".join(gone)))
    lines.append(("written to", str(folder)))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in lines)
