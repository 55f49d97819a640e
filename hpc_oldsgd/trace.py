"""Spans of compute, flight, wait and mix, as a Chrome/Perfetto trace: one process per rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TRACKS = ("compute", "wait", "mix", "flight", "reduce", "checkpoint", "evaluate")
# Flights overlap each other (K-GT sends x early and z late), so a lane per channel.


class Trace:
    """Collects spans of one rank in memory; `write` turns them into trace events."""

    def __init__(self, rank: int = 0, start_s: float | None = None) -> None:
        self.rank = rank
        # Wall time at perf_counter 0, so that ranks of one machine line up.
        self._epoch_s = time.time() - time.perf_counter() if start_s is None else start_s
        self.events: list[dict[str, Any]] = []

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        lane = TRACKS.index(track) * 10 + int(args.pop("lane", 0))
        event = {
            "name": name,
            "cat": track,
            "ph": "X",
            "pid": self.rank,
            "tid": lane,
            "ts": round((start_s + self._epoch_s) * 1e6, 1),
            "dur": round((end_s - start_s) * 1e6, 1),
            "args": args,
        }
        self.events.append(event)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"traceEvents": self._names() + self.events}))

    def _names(self) -> list[dict[str, Any]]:
        named: list[dict[str, Any]] = [
            {"ph": "M", "pid": self.rank, "name": "process_name",
             "args": {"name": f"rank {self.rank}"}}
        ]  # fmt: skip
        for lane in sorted({e["tid"] for e in self.events}):
            label = TRACKS[lane // 10] + (f" {lane % 10}" if lane % 10 else "")
            named.append(
                {"ph": "M", "pid": self.rank, "tid": lane, "name": "thread_name",
                 "args": {"name": label}}
            )  # fmt: skip
        return named


def merge(paths: Iterable[Path], out: Path) -> None:
    """One file for all ranks, starting at time 0."""
    events = [e for path in paths for e in json.loads(path.read_text())["traceEvents"]]
    start = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 1)
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
