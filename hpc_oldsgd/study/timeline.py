"""The schedules of algorithms over the same stretch of simulated time, one under the other.

What is drawn is what the virtual clock saw of the first agent while each schedule ran. `plot` draws
the same of a real run's trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import topology as topologies
from ..algorithms import Algorithm
from ..cli.fields import at_least
from ..errors import UserError
from ..plot import style
from ..plot.timeline import LOOKS
from ..runtime.plain import Plain
from ..runtime.runner import Runner
from ..simulation.clock import Clock, Times
from ..simulation.stacked import StackedTransport
from ..topology import Topology
from ..transport.base import LINE
from . import rows
from .collect import Record
from .figures import FORMATS
from .formulas import WARM_UP
from .report import Report, Section

TALL, THIN = 1.0, 0.62  # rows of gradients and of messages


@dataclass(frozen=True)
class Options:
    """The schedules of a few algorithms in simulated time: gradients, messages, waits."""

    algorithm: tuple[str, ...] = ("ldsgd", "oldsgd", "oldsgd:fragments=tau")
    """Which, as in `study speedup`."""
    tau: int = 5
    """Local steps a round."""
    c: float = 5.0
    """Gradients that a model-sized message lasts."""
    rounds: int = 2
    """How many of the slowest algorithm are shown."""
    topology: str = "ring"
    """Who talks to whom."""
    agents: int = 9
    """How many; the first one is drawn."""
    out: Path = Path("studies/timeline")
    """Folder of the figure, the table and the report."""

    def __post_init__(self) -> None:
        at_least(1, self, "tau", "rounds", "agents")
        at_least(0, self, "c")
        if not self.algorithm:
            raise UserError("--algorithm must be one or more names.")
        for row in self.algorithm:
            rows.check(row)
            if rows.make(row, self.tau) is None:
                raise UserError(f"{row} does not fit --tau {self.tau}: choose another.")


@dataclass
class Sent:
    start: float
    end: float
    share: float
    round: int
    step: int  # gradients taken when it left
    mixed: float = np.nan
    age: int = 0  # gradients between leaving and being mixed


@dataclass
class Seen:
    """What the first agent did, from the start of a round in which the schedule runs steadily."""

    row: str
    P: int
    gradients: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    """When each round began."""

    @property
    def round(self) -> float:
        return self.begun[-1] - self.begun[-2]


class Watch(Clock):
    """The virtual clock, and what happened by it."""

    def watch(self, row: str, algorithm: Algorithm) -> Seen:
        self.seen, self.flights = Seen(row, algorithm.P), dict[int, Sent]()
        return self.seen

    def compute(self) -> None:
        start = self.t[0]
        super().compute()
        self.seen.gradients.append((start, self.t[0]))

    def post(self, topology: Topology, round: int, share: float = 1.0) -> tuple[Times, Times]:
        return self._left(super().post(topology, round, share), round, share)

    def post_all_reduce(self) -> tuple[Times, Times]:
        return self._left(super().post_all_reduce(), len(self.seen.begun) - 1, 1.0)

    def _left(self, times: tuple[Times, Times], round: int, share: float) -> tuple[Times, Times]:
        posted, ready = times
        taken = len(self.seen.gradients)
        self.seen.sent.append(Sent(posted[0], ready[0], share, round, taken))
        self.flights[id(ready)] = self.seen.sent[-1]
        return times

    def wait(self, ready: Times) -> Times:
        start = self.t[0]
        exposed = super().wait(ready)
        if self.t[0] > start:
            self.seen.waits.append((start, self.t[0]))
        flight = self.flights.pop(id(ready))  # the transport hands back the array that it got
        flight.mixed, flight.age = self.t[0], len(self.seen.gradients) - flight.step
        return exposed


def main(options: Options) -> None:
    steps = [watched(row, options, options.rounds + 1) for row in options.algorithm]
    window = options.rounds * max(seen.round for seen in steps)
    # The others make more rounds meanwhile.
    many = [int(window / seen.round) + 2 for seen in steps]
    all_seen = [watched(row, options, n) for row, n in zip(options.algorithm, many, strict=True)]
    table = [in_numbers(seen, window) for seen in all_seen]
    setting = f"tau = {options.tau}, c = {options.c:g}, {options.topology} of {options.agents}"
    text = [
        f"{setting}; simulated time, 1 = one gradient. Age: gradients that an agent takes between "
        "sending its model, or a fragment of it, and mixing what came back."
    ]
    drawn = draw(all_seen, window, options.out / "timeline") if style.available() else []
    section = Section("Schedules", text, table, "timeline", drawn)
    Report("Schedules in simulated time", [section]).publish(options.out)


def watched(row: str, options: Options, count: int) -> Seen:
    """That many rounds, after a few in which a schedule may be different."""
    algorithm = rows.make(row, options.tau)
    assert algorithm is not None  # Options looked
    clock = Watch(options.agents, options.c)
    seen = clock.watch(row, algorithm)
    transport = StackedTransport(topologies.from_name(options.topology, options.agents), clock)
    X = torch.zeros(options.agents, LINE * algorithm.P)  # so that fragments are equally long
    runner = Plain(X, algorithm, transport, 1.0)
    runner.on_round.append(lambda runner: boundary(runner, clock, WARM_UP + count))
    runner.start()
    while not runner.finished:
        runner.advance(torch.zeros_like(X))
    runner.finish()
    return from_round(seen, WARM_UP)


def boundary(runner: Runner, clock: Watch, last: int) -> None:
    clock.seen.begun.append(float(clock.t[0]))
    if runner.r == last:
        runner.stop()


def from_round(seen: Seen, r: int) -> Seen:
    """The same with that round at time 0."""
    zero = seen.begun[r]
    late = [s for s in seen.sent if s.mixed > zero]
    sent = [Sent(s.start - zero, s.end - zero, s.share, s.round - r, s.step, s.mixed - zero, s.age)
            for s in late]  # fmt: skip

    def moved(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(a - zero, b - zero) for a, b in spans if b > zero]

    begun = [at - zero for at in seen.begun[r:]]
    return Seen(seen.row, seen.P, moved(seen.gradients), moved(seen.waits), sent, begun)


def in_numbers(seen: Seen, window: float) -> Record:
    ages = [s.age for s in seen.sent if s.mixed <= window]
    waited = sum(min(b, window) - a for a, b in seen.waits if a < window)
    return {
        "algorithm": seen.row,
        "a round takes": seen.round,
        f"gradients in {window:.4g}": sum(b <= window + 1e-9 for _, b in seen.gradients),
        "waiting": f"{waited / window:.0%}",
        "age of what is mixed": sum(ages) / len(ages) if ages else None,
    }


# --- the figure ---------------------------------------------------------------------------------
def draw(all_seen: list[Seen], window: float, stem: Path) -> list[Path]:
    with style.figure(stem, FORMATS, height=0.82 * len(all_seen) + 0.65) as figure:
        axes = figure.subplots(len(all_seen), 1, squeeze=False, sharex=True).ravel()
        for axis, seen in zip(axes, all_seen, strict=True):
            draw_one(axis, seen, window)
        axes[-1].set_xlabel("simulated time (1 = one gradient)")
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))

        handles = [Patch(color=LOOKS[k][0], label=LOOKS[k][1])
                   for k in ("compute", "flight", "wait", "mix")]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return [stem.with_suffix(".png")]


def draw_one(axis: Any, seen: Seen, window: float) -> None:
    lanes = draw_messages(axis, seen, window)
    for spans, look in ((seen.gradients, "compute"), (seen.waits, "wait")):
        inside = [(a, min(b, window) - a) for a, b in spans if a < window]
        axis.broken_barh(inside, (0, TALL), facecolor=LOOKS[look][0], edgecolor="white")
    mixed = sorted({s.mixed for s in seen.sent if s.mixed <= window})
    axis.vlines(mixed, 0, TALL + THIN, color=LOOKS["mix"][0], linewidth=2.2, zorder=4)
    bottom = TALL + THIN * lanes
    axis.vlines([t for t in seen.begun if t <= window], -0.2, bottom + 0.1, color=style.INK,
                linewidth=0.9, zorder=3)  # fmt: skip
    axis.set_xlim(-0.003 * window, 1.003 * window)
    axis.set_ylim(bottom + 0.15, -0.25)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_title(title(seen, window))


def title(seen: Seen, window: float) -> str:
    _, _, (done, count), _, (_, age) = in_numbers(seen, window).items()
    steps = "" if age is None else f", mixes models {age:.3g} step{'' if age == 1 else 's'} old"
    return f"{seen.row}: {count} {done}{steps}"


def draw_messages(axis: Any, seen: Seen, window: float) -> int:
    """Each in the first lane that is free then; the number of lanes."""
    free: list[float] = []
    colour, per_round = LOOKS["flight"][0], dict[int, int]()
    for s in sorted(seen.sent, key=lambda s: s.start):
        per_round[s.round] = k = per_round.get(s.round, 0) + 1
        if s.start >= window:
            break
        lane = next((i for i, end in enumerate(free) if end <= s.start + 1e-9), len(free))
        free[lane:] = [s.end, *free[lane + 1 :]]
        end, top = min(s.end, window), TALL + THIN * lane
        axis.broken_barh([(s.start, end - s.start)], (top, THIN * 0.94), facecolor=colour,
                         edgecolor="white")  # fmt: skip
        name = f"{k}/{seen.P}" if s.share < 1 else "model"
        axis.text((s.start + end) / 2, top + THIN / 2, name, ha="center", va="center", fontsize=6.5)
    return max(1, len(free))
