"""A few rounds as they really went: the paper's schematic, measured.

Each rank has a row for its thread (gradients, waits, mixing) and under it a thinner one for every
message that is on its way at the same time. Fragments of x are numbered, 1/5 to 5/5.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs.reader import Run, finite, read_object
from . import style

IN_FLIGHT = ("flight", "reduce")
LOOKS = {  # track -> colour, name
    "compute": ("#0072b2", "gradient"),
    "flight": ("#e69f00", "message on its way"),
    "wait": ("#d55e00", "waiting"),
    "mix": ("#009e73", "mixing"),
    "evaluate": ("#94a3b8", "measuring the mean model"),
    "checkpoint": ("#cc79a7", "checkpoint"),
}
ROUNDS = 3
RANKS = 4  # as many are shown unless asked
LANES = 10  # thread ids of a track, as trace.py gives them
LANE_IN, GAP_IN = 0.17, 0.1  # inches
MOST_LETTERS = 7  # of a fragment's name
LEGIBLE = 0.0055  # of the width, for each letter


class TooShort(UserError):
    """There is a trace, and nothing in it to draw."""


@dataclass(frozen=True)
class Span:
    rank: int
    track: str
    lane: int
    start: float  # ms
    end: float
    round: int | None
    fragment: str = ""  # 2/5: the second of five


@dataclass
class Timeline:
    """The spans of a run's chosen ranks between the starts of two rounds."""

    run: Run
    spans: list[Span]
    starts: dict[int, dict[int, float]]
    """Rank -> round -> when its first span began."""
    first: int
    last: int  # not included

    @property
    def ranks(self) -> list[int]:
        return sorted(self.starts)

    @property
    def window(self) -> tuple[float, float]:
        return (
            min(begun[self.first] for begun in self.starts.values()),
            max(begun[self.last] for begun in self.starts.values()),
        )

    def inside(self) -> list[Span]:
        a, b = self.window
        return [span for span in self.spans if span.end > a and span.start < b]


def read(run: Run, rounds: tuple[int, int] | None, ranks: Sequence[int]) -> Timeline:
    assert run.trace is not None
    spans = read_spans(run.trace)
    known = sorted({span.rank for span in spans})
    for rank in ranks:
        if rank not in known:
            raise UserError(f"{run.trace} has ranks {known[0]} to {known[-1]}, not {rank}.")
    chosen = sorted(set(ranks)) or known[:RANKS]
    spans = [span for span in spans if span.rank in chosen]
    starts = {rank: round_starts([s for s in spans if s.rank == rank]) for rank in chosen}
    complete = sorted(set.intersection(*(set(begun) for begun in starts.values())))
    if len(complete) < 2:
        raise TooShort(f"{run.trace} has no whole round: the run was too short.")
    if rounds is None:
        rounds = representative(complete, starts, spans)
    elif not {*rounds} <= {*complete}:
        raise UserError(
            f"{run.trace} has rounds {complete[0]}:{complete[-1]}, not {rounds[0]}:{rounds[1]}."
        )
    return Timeline(run, spans, starts, *rounds)


def read_spans(path: Path) -> list[Span]:
    try:
        events = [event for event in read_object(path)["traceEvents"] if event["ph"] == "X"]
        spans = [
            Span(
                int(event["pid"]), str(event["cat"]), int(event["tid"]) % LANES,
                event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3, event["args"].get("round"),
                str(event["args"].get("fragment", ""))[:MOST_LETTERS],
            )
            for event in events if drawable(event)
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a trace of this program: the file is damaged.") from None
    if not spans:
        raise TooShort(f"{path} has no spans: the run was too short.")
    return spans


def drawable(event: dict[str, Any]) -> bool:
    """It has a place in time, and its round, if any, is a number."""
    r = event["args"].get("round")
    return finite(event["ts"]) and finite(event["dur"]) and (r is None or isinstance(r, int))


def round_starts(spans: Sequence[Span]) -> dict[int, float]:
    """When each round began on one rank; the end of the last one counts as a start."""
    begun: dict[int, float] = {}
    ended = 0.0
    for span in spans:
        if span.track != "evaluate" and span.round is not None:
            begun[span.round] = min(span.start, begun.get(span.round, span.start))
            ended = max(ended, span.end)
    if begun:
        begun[max(begun) + 1] = ended
    return begun


def representative(
    rounds: Sequence[int], starts: dict[int, dict[int, float]], spans: Sequence[Span]
) -> tuple[int, int]:
    """Three rounds from the middle half of the run, as long as the median; undisturbed if any."""
    count = min(ROUNDS, len(rounds) - 1)
    windows = [(rounds[k], rounds[k + count]) for k in range(len(rounds) - count)]
    quarter = len(windows) // 4
    middle = windows[quarter : len(windows) - quarter]

    breaks = [s for s in spans if s.track in ("evaluate", "checkpoint") and not _in_flight(s)]

    def length(window: tuple[int, int]) -> float:
        return statistics.mean(begun[window[1]] - begun[window[0]] for begun in starts.values())

    def disturbed(window: tuple[int, int]) -> bool:
        return any(
            starts[span.rank][window[0]] < span.end and span.start < starts[span.rank][window[1]]
            for span in breaks
        )

    quiet = [window for window in middle if not disturbed(window)] or middle
    typical = statistics.median(map(length, quiet))
    return min(quiet, key=lambda window: abs(length(window) - typical))


def save(timelines: Sequence[Timeline], stem: Path, formats: Sequence[str]) -> list[Path]:
    """One axis per run, under each other and on one scale, so that lengths compare."""
    layouts = [_layout(timeline) for timeline in timelines]
    heights = [layout[1] + 0.5 for layout in layouts]
    lengths = [b - a for a, b in (timeline.window for timeline in timelines)]
    shared = max(lengths) < 5 * min(lengths)
    with style.figure(stem, formats, height=sum(heights) + 0.5) as figure:
        axes = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights).ravel()
        used: set[str] = set()
        for axis, timeline, (lanes, height), length in zip(
            axes, timelines, layouts, lengths, strict=True
        ):
            room = max(lengths) if shared else length
            used |= _draw(axis, timeline, lanes, height, room)
            axis.set_xlim(-0.003 * room, 1.003 * room)
        axes[-1].set_xlabel("time (ms)")
        from matplotlib.patches import Patch

        shown = [look for track, look in LOOKS.items() if track in used]
        handles = [Patch(color=colour, label=name) for colour, name in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return style.files(stem, formats)


Lanes = dict[tuple[int, str, int], tuple[float, float]]


def _layout(timeline: Timeline) -> tuple[Lanes, float]:
    """(rank, row, lane) -> top and height, in inches from the top; and the height of all."""
    inside = timeline.inside()
    lanes: Lanes = {}
    top = 0.0
    for rank in timeline.ranks:
        lanes[rank, "thread", 0] = (top, LANE_IN)
        top += LANE_IN
        flights = {(s.track, s.lane) for s in inside if s.rank == rank and _in_flight(s)}
        for track, lane in sorted(flights, key=lambda row: (row[0] == "evaluate", row)):
            lanes[rank, track, lane] = (top, LANE_IN * 0.6)
            top += LANE_IN * 0.6
        top += GAP_IN
    return lanes, top - GAP_IN


def _in_flight(span: Span) -> bool:
    return span.track in IN_FLIGHT or (span.track == "evaluate" and span.lane > 0)


def _legible(text: str, start: float, end: float, room: float) -> bool:
    return end - start > LEGIBLE * (len(text) + 1) * room


def _draw(
    axis: Any, timeline: Timeline, lanes: Lanes, height: float, room: float = 0.0
) -> set[str]:
    """`room` is as much time as the axis is wide; the window's if not given."""
    origin, end = timeline.window
    room = room or end - origin
    sliver = (end - origin) / 400  # a mix of microseconds still leaves a mark
    used = set()
    for span in timeline.inside():
        row = (span.rank, span.track, span.lane) if _in_flight(span) else (span.rank, "thread", 0)
        top, tall = lanes[row]
        a, b = max(span.start, origin), min(span.end, end)
        if span.track == "mix":
            b = max(b, a + sliver)
        elif b - a < sliver / 4:
            continue
        kind = "flight" if span.track == "reduce" else span.track
        used.add(kind)
        axis.broken_barh(
            [(a - origin, b - a)], (top, tall), facecolor=LOOKS[kind][0], edgecolor="white",
            linewidth=0.0 if kind == "mix" else 0.4, zorder=3 if kind == "mix" else 2,
        )  # fmt: skip
        if span.track == "flight" and span.fragment and _legible(span.fragment, a, b, room):
            axis.text((a + b) / 2 - origin, top + tall / 2, span.fragment, ha="center",
                      va="center_baseline", fontsize=5, color=style.INK, zorder=5)  # fmt: skip
    _marks(axis, timeline, lanes, origin)
    axis.set_ylim(height + GAP_IN / 2, -0.16)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    tops = [lanes[rank, "thread", 0] for rank in timeline.ranks]
    axis.set_yticks([top + tall / 2 for top, tall in tops], [f"rank {r}" for r in timeline.ranks])
    axis.grid(True, axis="x")
    axis.set_title(f"{timeline.run.label}: {in_numbers(timeline)}")
    return used


def _marks(axis: Any, timeline: Timeline, lanes: Lanes, origin: float) -> None:
    """Where rounds begin on each rank, and their numbers over the first."""
    for rank, begun in timeline.starts.items():
        own = [at for (owner, _, _), at in lanes.items() if owner == rank]
        top, bottom = min(t for t, _ in own), max(t + h for t, h in own)
        at = [begun[r] - origin for r in range(timeline.first, timeline.last + 1) if r in begun]
        axis.vlines(at, top - GAP_IN / 3, bottom + GAP_IN / 3, color=style.INK, linewidth=1.0,
                    zorder=4)  # fmt: skip
    begun = timeline.starts[timeline.ranks[0]]
    for r in range(timeline.first, timeline.last):
        middle = (begun[r] + begun[r + 1]) / 2 - origin
        axis.text(middle, -0.05, f"round {r}", ha="center", va="bottom", fontsize=7)


def in_numbers(timeline: Timeline) -> str:
    """The window in numbers: a round's length, a message's, and how much of it was hidden."""
    rounds = timeline.last - timeline.first
    length = statistics.mean(
        (begun[timeline.last] - begun[timeline.first]) / rounds
        for begun in timeline.starts.values()
    )
    shown = [s for s in timeline.spans
             if s.round is not None and timeline.first <= s.round < timeline.last]  # fmt: skip
    flights = [s.end - s.start for s in shown if s.track in IN_FLIGHT]
    waits = [s.end - s.start for s in shown if s.track == "wait"]
    text = f"{_ms(length)} a round"
    if flights:
        hidden = max(0.0, 1 - sum(waits) / max(sum(flights), 1e-9))
        text += f", {_ms(statistics.mean(flights))} a message, {hidden:.0%} of it hidden"
    return text


def _ms(time: float) -> str:
    return f"{time:.0f} ms" if time >= 100 else f"{time:.3g} ms"
