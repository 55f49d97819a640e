"""The timeline: from spans, through the real trace writer, to bars whose lengths are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.plot import timeline
from hpc_oldsgd.runs.reader import Run
from hpc_oldsgd.transport.trace import Trace, merge

pytest.importorskip("matplotlib")
TAU, ROUND_S, FLIGHT_S, WAIT_S = 3, 0.1, 0.08, 0.02


def write_trace(
    path: Path, ranks: int = 2, rounds: int = 20, evaluated: tuple[int, ...] = ()
) -> Run:
    """OLDSGD on a clock of our own: round r of rank i starts at r/10 + i/100 seconds."""
    parts = []
    for i in range(ranks):
        trace = Trace(i)
        for r in range(rounds):
            start = 100.0 + r * ROUND_S + i * 0.01
            for k in range(TAU):
                a = start + k * 0.025
                trace.span("compute", "gradient", a, a + 0.025, t=TAU * r + k + 1, round=r)
            mixed = start + TAU * 0.025 + WAIT_S
            trace.span("flight", "exchange", start, start + FLIGHT_S, round=r, lane=0)
            trace.span("wait", "exchange", mixed - WAIT_S, mixed, round=r)
            trace.span("mix", "mix", mixed, mixed + 1e-4, round=r)
            if r in evaluated:
                trace.span("evaluate", "measure", mixed + 1e-4, start + ROUND_S, round=r - 2)
        part = path / f"{i}.json"
        trace.write(part)
        parts.append(part)
    merge(parts, path / "trace.json")
    return Run(path, [], "wall", label="a run")


def test_numbers_of_a_window(tmp_path):
    found = timeline.read(write_trace(tmp_path), (4, 7), ())
    assert found.window == pytest.approx((400.0, 710.0))  # rank 1 starts 10 ms later
    assert timeline.in_numbers(found) == "100 ms a round, 80 ms a message, 75% of it hidden"
    inside = [s for s in found.inside() if s.rank == 0 and s.track == "compute"]
    assert len(inside) == 3 * TAU + 1  # the first of round 7 is there for rank 1's sake


def test_bars_lie_where_the_spans_were(tmp_path):
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    found = timeline.read(write_trace(tmp_path, ranks=1), (4, 6), ())
    axis: Any = Figure().subplots()
    lanes, height = timeline._layout(found)
    assert timeline._draw(axis, found, lanes, height) == {"compute", "flight", "wait", "mix"}
    bars: dict[str, list[tuple[float, float]]] = {}
    for bar in axis.collections:
        for path in bar.get_paths() if len(bar.get_facecolor()) else []:
            (x0, _), (x1, _) = path.get_extents().get_points()
            bars.setdefault(to_hex(bar.get_facecolor()[0]), []).append((x0, x1 - x0))
    flights = [value for pair in bars[timeline.LOOKS["flight"][0]] for value in pair]
    waits = [value for pair in bars[timeline.LOOKS["wait"][0]] for value in pair]
    assert flights == pytest.approx([0, 80, 100, 80], abs=1e-6)
    assert waits == pytest.approx([75, 20, 175, 20], abs=1e-6)
    assert len(bars[timeline.LOOKS["compute"][0]]) == 2 * TAU


def test_the_window_is_typical_and_undisturbed(tmp_path):
    evaluated = tuple(r for r in range(20) if r not in (9, 10, 11))
    found = timeline.read(write_trace(tmp_path, evaluated=evaluated), None, ())
    assert (found.first, found.last) == (9, 12)
    always = timeline.read(write_trace(tmp_path, evaluated=tuple(range(20))), None, ())
    assert always.last - always.first == 3 and 4 <= always.first <= 14


def test_a_short_run_shows_what_there_is(tmp_path):
    found = timeline.read(write_trace(tmp_path, rounds=1), None, ())
    assert (found.first, found.last) == (0, 1)


def test_ranks_are_chosen_and_checked(tmp_path):
    run = write_trace(tmp_path, ranks=6)
    assert timeline.read(run, None, ()).ranks == [0, 1, 2, 3]
    assert timeline.read(run, None, (5, 2)).ranks == [2, 5]
    with pytest.raises(UserError, match="ranks 0 to 5, not 6"):
        timeline.read(run, None, (6,))
    with pytest.raises(UserError, match="rounds 0:20, not 18:22"):
        timeline.read(run, (18, 22), ())


def test_fragments_are_numbered_where_there_is_room(tmp_path):
    from matplotlib.figure import Figure

    trace = Trace(0)
    for r in range(2):
        for k in range(3):
            a = r + k / 3
            trace.span("compute", "gradient", a, a + 0.3, round=r)
            trace.span("flight", "exchange", a, a + 0.2 / 30**k, round=r, fragment=f"{k + 1}/3")
    trace.write(tmp_path / "trace.json")
    names = {e["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"exchange 1/3", "exchange 2/3", "exchange 3/3", "gradient"} <= names
    found = timeline.read(Run(tmp_path, [], "wall"), (0, 2), ())
    axis: Any = Figure().subplots()
    timeline._draw(axis, found, *timeline._layout(found))
    shown = [text.get_text() for text in axis.texts if "/" in text.get_text()]
    assert shown == ["1/3", "1/3"]


def test_flights_at_the_same_time_have_lanes_of_their_own(tmp_path):
    trace = Trace(0)
    for r in range(3):
        trace.span("compute", "gradient", r, r + 0.9, round=r)
        trace.span("flight", "exchange", r, r + 0.8, round=r, lane=0)
        trace.span("flight", "exchange", r + 0.5, r + 0.9, round=r, lane=1)
        trace.span("evaluate", "evaluate", r, r + 0.9, round=r, lane=1)
    trace.write(tmp_path / "trace.json")
    lanes, _ = timeline._layout(timeline.read(Run(tmp_path, [], "wall"), None, ()))
    rows = sorted(lanes, key=lambda row: lanes[row][0])
    assert rows == [(0, "thread", 0), (0, "flight", 0), (0, "flight", 1), (0, "evaluate", 1)]


def test_two_runs_share_one_scale(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [write_trace(tmp_path / "a"), write_trace(tmp_path / "b", ranks=3)]
    files = timeline.save(
        [timeline.read(r, None, ()) for r in runs], tmp_path / "t", ["png", "svg"]
    )
    assert files == [tmp_path / "t.png", tmp_path / "t.svg"]
    assert all(10_000 < file.stat().st_size < 200_000 for file in files)
    text = files[1].read_text()
    assert text.count("a run: 100 ms a round") == 2 and "<!-- rank 2 -->" in text


def test_clocks_of_other_machines_are_brought_to_rank_0s(tmp_path, monkeypatch):
    """Rank 1's clock is 5 s ahead at its 10 s and 7 s ahead at its 20 s."""
    trace = Trace(1)
    for now, offset in ((10.0, -5.0), (20.0, -7.0)):
        monkeypatch.setattr(Trace, "now", staticmethod(lambda now=now: now))
        trace.align(offset)
    for start in (10.0, 15.0, 20.0, 25.0):
        trace.span("compute", "gradient", start, start + 1.0, round=0)
    trace.write(tmp_path / "1.json")
    events = json.loads((tmp_path / "1.json").read_text())["traceEvents"]
    starts = [event["ts"] / 1e6 for event in events if event["ph"] == "X"]
    assert starts == pytest.approx([5.0, 9.0, 13.0, 18.0])
    assert {event["dur"] for event in events if event["ph"] == "X"} == {1e6}


def test_events_without_a_place_in_time_are_left_out(tmp_path):
    run = write_trace(tmp_path)
    whole = timeline.read_spans(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    event = next(e for e in content["traceEvents"] if e["ph"] == "X")
    for change in ({"ts": float("inf")}, {"ts": 10**400}, {"dur": float("nan")}):
        content["traceEvents"].append({**event, **change})
    content["traceEvents"].append({**event, "args": {"round": "a"}})
    (tmp_path / "trace.json").write_text(json.dumps(content))
    assert timeline.read_spans(tmp_path / "trace.json") == whole
    timeline.read(run, None, ())
