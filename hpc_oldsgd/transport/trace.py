"""Spans of compute, flight, wait and mix, as a Chrome/Perfetto trace: one process per rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_atomically

TRACKS = ("compute", "wait", "mix", "flight", "reduce", "checkpoint", "evaluate")
# Flights overlap each other (K-GT sends x early and z late), so a track has lanes.
LANES = 10


class Trace:
    """Collects spans of one rank in memory; `write` turns them into trace events."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.events: list[dict[str, Any]] = []
        self._marks: list[tuple[float, float]] = []

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def align(self, offset_s: float) -> None:
        """Rank 0's clock minus ours, as it is now. Clocks drift, so a run measures it twice."""
        self._marks.append((self.now(), offset_s))

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """With `fragment`, as in 2/5, the name says so."""
        lane = TRACKS.index(track) * LANES + min(int(args.pop("lane", 0)), LANES - 1)
        event = {
            "name": f"{name} {args['fragment']}" if "fragment" in args else name,
            "cat": track,
            "ph": "X",
            "pid": self.rank,
            "tid": lane,
            "ts": start_s,  # in microseconds of rank 0's clock once written
            "dur": round((end_s - start_s) * 1e6, 1),
            "args": args,
        }
        self.events.append(event)

    def write(self, path: Path) -> None:
        starts = np.array([event["ts"] for event in self.events])
        if self._marks:
            times, offsets = zip(*self._marks, strict=True)
            starts = starts + np.interp(starts, times, offsets)
        placed = [
            {**event, "ts": round(start * 1e6, 1)}
            for event, start in zip(self.events, starts.tolist(), strict=True)
        ]
        path.write_text(json.dumps({"traceEvents": self._names() + placed}))

    def _names(self) -> list[dict[str, Any]]:
        named: list[dict[str, Any]] = [
            {"ph": "M", "pid": self.rank, "name": "process_name",
             "args": {"name": f"rank {self.rank}"}}
        ]  # fmt: skip
        for tid in sorted({e["tid"] for e in self.events}):
            track, lane = divmod(tid, LANES)
            named.append(
                {"ph": "M", "pid": self.rank, "tid": tid, "name": "thread_name",
                 "args": {"name": TRACKS[track] + (f" {lane}" if lane else "")}}
            )  # fmt: skip
        return named


def merge(paths: Iterable[Path], out: Path) -> None:
    """One file for all ranks, starting at time 0."""
    events = [e for path in paths for e in json.loads(path.read_text())["traceEvents"]]
    start = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 1)
    write_atomically(out, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
