"""--tensorboard: the columns of metrics.jsonl as event files, over a resumed run too."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd import simulate
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import spec
from hpc_oldsgd.training import options as run_options

SHORT = ["--task", "logistic", "--tau", "2", "--agents", "2", "--eval-every", "2", "--tensorboard"]


def run(out: Path, *words: str) -> None:
    argv = [*SHORT, "--out", str(out), *words]
    simulate.run(spec.parse(run_options.SimulateOptions, "simulate", argv))


def test_event_files_hold_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    run(out, "--iterations", "12")
    run(out, "--iterations", "24", "--resume", "auto")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = events.EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    for key in ("train_loss", "test_accuracy", "consensus"):
        scalars = found.Scalars(key)
        assert [s.step for s in scalars] == [row["iteration"] for row in rows]
        assert [s.value for s in scalars] == pytest.approx([row[key] for row in rows], rel=1e-6)


def test_without_the_package_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_options, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hpc_oldsgd\[tensorboard\]'"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
