"""What makes a run the same run, written once: for --resume, and for studies that reuse runs.

The two ask different questions. A run that is resumed must go on bit for bit, its times included.
A study may use any run with the same iterates: times at another c come from a replay.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..topology import Topology
from ..training.options import SimulateOptions
from .folder import clean
from .spec import Spec

ITERATES = (
    "topology", "weights", "partition", "optimizer", "momentum", "weight_decay", "buffers", "wire",
    "seed", "warmup",
)  # fmt: skip
PACE = ("slow", "jitter")  # how long a gradient takes
CLOCK = ("c", "degree_aware", *PACE)  # how long anything takes in simulated time
LATE = ("late", "late_wait", "staleness")  # with --late reuse the times decide the iterates
DEFAULTS = json.loads(json.dumps(clean(dataclasses.asdict(SimulateOptions()))))
OLDER_OPTIONS = {"warmup": 0}  # what a checkpoint that does not name them has
DIFFER = {
    "W": "the mixing weights differ", "model": "the model differs", "data": "the data differs",
}  # fmt: skip


def identity(kind: str, spec: Spec[Any], topology: Topology, model: nn.Module) -> dict[str, Any]:
    """What must be equal for a resumed run to be the run that never stopped."""
    config, algorithm, task = spec.options, spec.algorithm, spec.task
    shapes = [f"{k}{tuple(t.shape)}{t.dtype}" for k, t in model.state_dict().items()]
    options = dataclasses.asdict(config)
    names = ITERATES + (CLOCK if kind == "simulate" else ()) + (LATE if _reuses(options) else ())
    data = task.fingerprint()
    return {
        "kind": kind,
        "agents": topology.n,
        "algorithm": algorithm.name,
        **algorithm.options(),
        "task": task.name,
        # Where the data lies may change, the data may not.
        **{k: v for k, v in dataclasses.asdict(task).items() if not is_place(k, v)},
        **{name: _plain(options[name]) for name in names},
        **({} if "topology" in config.choice else {"W": topology.digest()}),
        "model": hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:16],
        **({"data": data} if data else {}),
        **config.choice,
    }


def differences(now: dict[str, Any], then: dict[str, Any]) -> str:
    """One sentence, or nothing if it is the same run."""
    if now["agents"] != then.get("agents"):
        return (
            f"the checkpoint is of {then.get('agents')} agents, not {now['agents']}: start as "
            "many, or add --resume-average for a fresh start from their mean"
        )
    said = []
    then = {**OLDER_OPTIONS, **_older(now["algorithm"]), **then}
    for key in {**now, **then}:
        a, b = now.get(key), then.get(key)
        if a == b or key == "download" or (key == "data" and key not in then):
            continue  # checkpoints of old versions name the one and not the other
        said.append(DIFFER.get(key, f"{key.replace('_', '-')} is {a}, was {b}"))
    if not said:
        return ""
    return f"this is another run than the checkpoint's: {'; '.join(said)}"


def described(spec: Spec[Any], agents: int) -> dict[str, Any]:
    """What config.json says of a run, and what `same_iterates` reads of it."""
    return {
        "options": dataclasses.asdict(spec.options),
        "algorithm": {"name": spec.algorithm.name, **spec.algorithm.options()},
        "task": {"name": spec.task.name, **dataclasses.asdict(spec.task)},
        "agents": agents,
        "alpha": spec.alpha,
    }


def same_iterates(config: dict[str, Any], mpi: bool) -> str:
    """A key that is equal for runs with the same iterates; from config.json, or `described`."""
    known = json.loads(json.dumps(clean(config)))
    algorithm = {**_older(known["algorithm"]["name"]), **known["algorithm"]}
    task = {k: v for k, v in known["task"].items() if not k.endswith("_dir")}
    given = {**DEFAULTS, **known["options"]}  # an older run lacks newer options
    names = {*ITERATES, "bn", "late"}
    if _reuses(given):
        names |= {*LATE, *CLOCK}
    elif mpi:
        names |= {*PACE}  # real time cannot be replayed
    same = {name: given[name] for name in names}
    parts = [algorithm, task, same, known["agents"], known["alpha"], mpi]
    return json.dumps(parts, sort_keys=True)


def _older(algorithm: str) -> dict[str, Any]:
    """Options that older versions did not have, at the values they meant."""
    return {"fragments": 1} if algorithm in ("oldsgd", "dsgd_cta") else {}


def _reuses(options: dict[str, Any]) -> bool:
    return bool(options["late"] == "reuse")


def is_place(name: str, value: Any) -> bool:
    known = ("pretrained", "tokenizer", "download")
    return isinstance(value, Path) or name.endswith("_dir") or name in known


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
