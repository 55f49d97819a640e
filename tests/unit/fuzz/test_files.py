"""Whatever a run's files hold: they are read, or refused in one sentence. See `make fuzz`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hpc_oldsgd import export
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.runs import folder as run_folder
from hpc_oldsgd.runs import reader
from hpc_oldsgd.runtime import part_file
from hpc_oldsgd.runtime.part_file import Unusable
from support.random_input import cases, refused_or, values

MANIFEST: dict[str, Any] = {
    "format": store.FORMAT, "round": 3, "iteration": 6, "time": 0.5, "alpha": 0.1, "bn": "average",
    "shards": [{"file": store.part_name(k), "bytes": 10, "sha256": "00"} for k in range(2)],
    "run": {"agents": 2, "kind": "train"}, "layout": {},
}  # fmt: skip


def manifest_file(folder: Path, body: str, sha256: str | None = None) -> Path:
    digest = sha256 or hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()
    place = folder / store.FOLDER / "round-00000003"
    place.mkdir(parents=True, exist_ok=True)
    (place / store.MANIFEST).write_text(json.dumps({"sha256": digest, "manifest": body}))
    return place


def use(found: store.Checkpoint | None) -> None:
    """What resuming asks of a manifest."""
    if found is None:
        return
    assert found.r >= 0 and found.count > 0
    for shard in range(found.count + 1):
        refused_or(lambda shard=shard: found.check(shard), Unusable)
    assert all(found.path(k).parent == found.folder for k in range(found.count))


@cases
@given(st.data())
def test_manifests(folder: Path, data: st.DataObject) -> None:
    """Whole manifests with a right checksum in which some values are not what they should be."""
    manifest = json.loads(json.dumps(MANIFEST))
    for _ in range(data.draw(st.integers(0, 3))):
        place = manifest
        if data.draw(st.booleans()):
            place = manifest[data.draw(st.sampled_from(["run", "layout"]))]
        elif data.draw(st.booleans()):
            place = manifest["shards"][data.draw(st.integers(0, 1))]
        if not isinstance(place, dict):
            continue
        key = data.draw(st.sampled_from([*place, "other"]))
        if data.draw(st.booleans()):
            place.pop(key, None)
        else:
            place[key] = data.draw(values | st.sampled_from(["../x", "/etc/passwd", -1, 10**30]))
        if not all(isinstance(manifest.get(k), dict) for k in ("run", "layout")) or not (
            isinstance(manifest.get("shards"), list)
            and len(manifest["shards"]) == 2
            and all(isinstance(e, dict) for e in manifest["shards"])
        ):
            break
    place = manifest_file(folder, json.dumps(manifest))
    use(refused_or(lambda: store.find(place), Unusable))


@cases
@given(st.text(max_size=40) | values.map(json.dumps), st.booleans())
@example("[" * 100_000, True)
@example('{"format": 1, "round": 1e999}', True)
def test_manifests_of_anything(folder: Path, body: str, right: bool) -> None:
    place = manifest_file(folder, body, None if right else "0" * 64)
    use(refused_or(lambda: store.find(place), Unusable))


@cases
@given(st.binary(max_size=200))
def test_manifest_bytes(folder: Path, content: bytes) -> None:
    place = manifest_file(folder, "{}")
    (place / store.MANIFEST).write_bytes(content)
    assert refused_or(lambda: store.find(place), Unusable) is None


@cases
@given(st.data())
def test_shards_damaged(folder: Path, data: st.DataObject) -> None:
    """Any change is noticed by the checksum; read all the same, it gives a tree or is refused."""
    tree = {"x": torch.arange(5.0), "deep": [1, None, {"y": torch.ones(2, dtype=torch.int64)}]}
    written = part_file.write(folder / "shard", tree)
    content = bytearray((folder / "shard").read_bytes())
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del changed[data.draw(st.integers(len(changed) // 2, len(changed))) :]
    (folder / "shard").write_bytes(changed)
    if changed != content:
        with pytest.raises(Unusable):
            part_file.check(folder / "shard", written)
    refused_or(lambda: part_file.read(folder / "shard"), Unusable)


@cases
@given(values.map(json.dumps))
@example('{"dict": [[[], 1]]}')
@example('{"tensor": "nowhere"}')
def test_trees_of_anything(folder: Path, described: str) -> None:
    save_file({"x": torch.ones(2)}, folder / "shard", {"tree": described})
    refused_or(lambda: part_file.read(folder / "shard"), Unusable)


# --- a run's other files ------------------------------------------------------------------------


@cases
@given(st.lists(values.map(json.dumps) | st.text(max_size=20), max_size=4), values, values)
@example(['{"round": null, "iteration": 3}'], {}, {})
@example(['{"round": 1e999}', '{"iteration": NaN, "algorithm": []}'], {}, {})
@example([], {"options": 3}, {"time_unit": []})
@example([], {"task": {"name": "digits", "batch": "x"}, "options": {}}, {})
@example([], {"task": {"name": []}}, {})
def test_run_folders(folder: Path, lines: list[str], config: Any, summary: Any) -> None:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").write_text(json.dumps(summary))
    rows = run_folder.rows_before(run, 10)
    assert all(isinstance(row, dict) and int(row["round"]) < 10 for row in rows)
    refused_or(lambda: reader.read_one(run))
    refused_or(lambda: export.task_of(run))
