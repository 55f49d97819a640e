"""What tells runs apart goes into their labels, what they share into the title."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runs.reader import Run

NAMED = ("algorithm", "task", "topology", "partition", "optimizer")  # a value that needs no name
SYMBOLS = {"tau": "τ", "alpha": "α", "agents": "n", "name": ""}
TITLE = ("task", "algorithm", "topology", "agents", "tau", "c", "alpha", "partition")
# Shown only if nothing else tells two runs apart.
MINOR = (
    "iterations", "target", "eval_every", "eval_samples", "final_test", "progress", "staging",
    "threads", "gradients", "device", "native", "timeout", "machine", "commit", "data_dir",
)  # fmt: skip
NEVER = (
    "out", "overwrite", "tensorboard", "trace", "lambda_2", "p", "changed", "download", "resume",
    "checkpoint_every", "checkpoint_seconds", "keep", "on_signal",
)  # fmt: skip


def tell_apart(runs: Sequence[Run]) -> None:
    """Give every run its label and its line."""
    tables = [settings(run) for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    differ = [key for key in keys if len({t[key] for t in tables if key in t}) > 1]
    main = [key for key in differ if key not in MINOR]
    labels = [_text(table, main) for table in tables]
    clocks = {run.clock for run in runs}
    if len(clocks) > 1:
        labels = _joined(labels, ["simulated" if r.clock == "simulated" else "MPI" for r in runs])
    if len(set(labels)) < len(labels):
        minor = [key for key in differ if key in MINOR]
        labels = _joined(labels, [_text(table, minor) for table in tables])
    for k, (run, label) in enumerate(zip(runs, labels, strict=True)):
        run.line = k
        twin = not label or labels.count(label) > 1
        folder = run.path.resolve().name
        run.label = (f"{label} ({folder})" if label else folder) if twin else label


def title(runs: Sequence[Run]) -> str:
    """What all runs have in common, of what a reader asks first."""
    tables = [settings(run) for run in runs]
    common = [
        key for key in TITLE
        if len({table.get(key) for table in tables}) == 1 and key in tables[0]
    ]  # fmt: skip
    return _text(tables[0], common)


def settings(run: Run) -> dict[str, Any]:
    """The config, flat: algorithm's and task's options beside the run's own."""
    config = run.config
    flat: dict[str, Any] = {}
    for section in ("algorithm", "task", "topology"):
        part = config.get(section)
        if isinstance(part, dict):
            flat |= {section if key == "name" else key: value for key, value in part.items()}
    flat |= {k: config[k] for k in ("agents", "alpha", "iterations") if k in config}
    for part in (config.get("options"), config.get("transport")):
        if isinstance(part, dict):
            flat |= {key: value for key, value in part.items() if key not in flat}
    return {k: _hashable(v) for k, v in flat.items() if k not in NEVER and v is not None}


def _joined(labels: Sequence[str], more: Sequence[str]) -> list[str]:
    return [", ".join(filter(None, pair)) for pair in zip(labels, more, strict=True)]


def _text(table: dict[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(_pair(key, table[key]) for key in keys if key in table)


def _pair(key: str, value: Any) -> str:
    if key in NAMED:
        return str(value)
    name = SYMBOLS.get(key, key.replace("_", " "))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, tuple):
        value = " ".join(map(str, value)) or "none"
    return f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(v) for v in value)
    return str(value) if isinstance(value, dict) else value
