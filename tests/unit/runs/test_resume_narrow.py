"""A simulated run of differences, with neighbours left out, that crashes and is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.transport.narrow import Streams
from support.bits import same
from support.runs import crash, last, rows_of, simulated

LATE = (
    "--task logistic --agents 4 --tau 2 --iterations 40 --eval-every 3 --checkpoint-every 2 "
    "--late reuse --late-wait 0.1 --staleness 2 --jitter 0.8 --c 8"
)


@pytest.mark.parametrize(
    "more",
    [
        "--wire int4",
        "--wire int8 --algorithm kgt",
        "--wire int4 --fragments 2 --topology one-peer-ring --c 16",
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, more: str) -> None:
    words = f"{LATE} {more}"
    simulated(words, tmp_path / "whole")
    crash(words, tmp_path / "cut")
    simulated(f"{words} --resume auto", tmp_path / "cut")
    whole, cut = (last(tmp_path / run)["runner"] for run in ("whole", "cut"))
    assert whole["t"] == cut["t"] == 40 and same(whole, cut)
    rows = rows_of(tmp_path / "whole")
    assert rows == rows_of(tmp_path / "cut")
    early, after = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert all(any(row.get("left_out") for row in half) for half in (early, after))


@pytest.mark.parametrize("owner", [Streams, StackedTransport], ids=["z", "counts"])
def test_what_a_checkpoint_holds_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    """Without the public copies, or without how often each edge was left out, it is another run."""
    simulated(f"{LATE} --wire int4", tmp_path / "whole")
    crash(f"{LATE} --wire int4", tmp_path / "cut")
    load = owner.load_state_dict
    monkeypatch.setattr(owner, "load_state_dict", lambda self, _, *more: load(self, {}, *more))
    simulated(f"{LATE} --wire int4 --resume auto", tmp_path / "cut")
    whole, cut = (last(tmp_path / run)["runner"]["x"] for run in ("whole", "cut"))
    assert not same(whole, cut)
