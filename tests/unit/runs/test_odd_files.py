"""Files of a run that no damage explains: refused in one sentence, with nothing changed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_oldsgd import cli, export
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.runs import reader
from hpc_oldsgd.runtime import part_file
from support.runs import SHORT, contents, simulated

SHORTER = SHORT.replace("40", "8") + " --momentum 0.9 --keep 1"
MORE = SHORTER + " --iterations 12 --resume auto"
ODD: list[Any] = [None, 7, "odd", [], {}, [[]], {"odd": 7}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(SHORTER, tmp_path_factory.mktemp("whole") / "run")


def refused(act: Callable[..., object], *given: Any) -> str:
    """What a command line would say; nothing where it goes through."""
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said), cli.guard("command"):
        act(*given)
        return ""
    lines = [line for line in said.getvalue().splitlines() if line.startswith("command: ")]
    assert len(lines) == 1, said.getvalue()
    return lines[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_pipe_in_place_of_a_file(whole: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / name).unlink()
    os.mkfifo(run / name)
    assert refused(reader.read, [run])
    if name == "metrics.jsonl":
        assert "metrics.jsonl: not a regular file" in refused(simulated, MORE, run)
    else:
        assert "not a regular file" in refused(export.task_of, run)
        shutil.rmtree(run / store.FOLDER)
        (run / "summary.json").unlink()
        assert "config.json cannot be read" in refused(simulated, MORE, run)
    assert (run / name).is_fifo()


def rewrite(run: Path, which: str, place: tuple[Any, ...], odd: Any) -> None:
    """The newest checkpoint with another manifest or state, and with right checksums."""
    found = export.newest(run, print)
    state = found.read(0)
    body = json.loads(json.loads((found.folder / store.MANIFEST).read_text())["manifest"])
    change(body if which == "manifest" else state, place, odd)
    written = part_file.write(found.path(0), state)
    body["shards"][0] |= {"bytes": written.bytes, "sha256": written.sha256}
    text = json.dumps(body)
    outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}
    (found.folder / store.MANIFEST).write_text(json.dumps(outer))


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a tree."""
    found = [at] if at else []
    if isinstance(tree, (dict, list)):
        steps = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found += [place for k, v in list(steps)[:8] for place in places(v, (*at, k))]
    return found


def change(tree: Any, place: tuple[Any, ...], odd: Any) -> None:
    for key in place[:-1]:
        tree = tree[key]
    if odd == "missing":
        del tree[place[-1]]
    else:
        tree[place[-1]] = odd


def mean_of(run: Path) -> None:
    export.mean_state_dict(export.newest(run, print))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["manifest", "state"])
def test_odd_fields_with_right_checksums(whole: Path, tmp_path: Path, which: str) -> None:
    """Every field left out, then of another kind, once each: it goes on, or one line says why."""
    found = export.newest(whole, print)
    tree = found.manifest if which == "manifest" else found.read(0)
    cases = [p for p in places(tree) if p[0] not in ("shards", "format")]
    assert len(cases) > 25
    refusals = 0
    for k, place in enumerate(cases):
        for odd in ("missing", ODD[k % len(ODD)]):
            run = Path(shutil.copytree(whole, tmp_path / "run"))
            rewrite(run, which, place, odd)
            before = contents(run)
            refused(mean_of, run)
            if refused(simulated, MORE, run):
                refusals += 1
                del before[".lock"]
                now = contents(run)
                del now[".lock"]
                assert now == before, (place, odd)
            shutil.rmtree(run)
    assert refusals > len(cases) / 2
