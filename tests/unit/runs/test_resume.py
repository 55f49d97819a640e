"""What --resume refuses, and what it leaves alone when it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_oldsgd import export, tasks
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs.identity import differences, identity
from hpc_oldsgd.runs.spec import make_topology
from hpc_oldsgd.tasks import Digits
from support.data_files import write_bpe, write_wikitext
from support.runs import SHORT, contents, last, parse, rows_of, simulated

FROZEN = "--task half-frozen --agents 2 --tau 2 --eval-every 5 --eval-samples 50 --iterations 20"
seed = [0]


@pytest.fixture(autouse=True)
def half_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @dataclass(kw_only=True)
    class HalfFrozen(Digits):
        def model(self) -> nn.Module:
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
            with torch.no_grad():
                model[1].weight.normal_(generator=torch.Generator().manual_seed(seed[0]))
            model[1].requires_grad_(False)
            return model

    known = tasks.registry()
    monkeypatch.setattr(tasks, "registry", lambda: {**known, "half-frozen": HalfFrozen})
    HalfFrozen.name = "half-frozen"
    seed[0] = 0
    yield


def test_a_complete_run_is_not_replaced(tmp_path: Path) -> None:
    run = simulated(SHORT, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(UserError, match=r"holds a complete run.*--overwrite .* another --out"):
        simulated(f"{SHORT} --resume auto", run)
    assert contents(run) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_checkpoints_out_of_reach_are_not_none(tmp_path: Path, kind: str) -> None:
    """As when the disk that a link leads to is not mounted."""
    run = simulated(SHORT, tmp_path / "run")
    (run / "checkpoints").rename(tmp_path / "moved")
    (run / "summary.json").unlink()
    if kind == "link":
        (run / "checkpoints").symlink_to(tmp_path / "not mounted")
    else:
        (run / "checkpoints").touch()
    before = contents(run)
    with pytest.raises(UserError, match="checkpoints cannot be read: N"):
        simulated(f"{SHORT} --resume auto", run)
    assert contents(run) == before


def test_the_start_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    run = simulated(SHORT, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    for change in ("--algorithm ldsgd", "--task digits", "--seed 1"):
        with pytest.raises(UserError, match=r"holds another run: (algorithm|task|seed) is"):
            simulated(f"{SHORT} {change} --resume auto", run)
    simulated(f"{SHORT} --resume auto", run)  # the same begins anew, as after an early kill
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        simulated(f"{SHORT} --resume auto", run)


def test_a_refused_resume_has_removed_nothing(tmp_path: Path) -> None:
    run = simulated(f"{FROZEN} --checkpoint-every 2 --keep 9", tmp_path / "run")
    before = contents(run)
    seed[0] = 1
    with pytest.raises(UserError, match=r"the frozen 1\.weight is not the checkpoint's"):
        simulated(f"{FROZEN} --resume auto --iterations 24", run)
    assert contents(run) == before


def test_an_older_checkpoint_does_not_replace_newer_ones(tmp_path: Path) -> None:
    run = simulated(f"{SHORT} --keep 9", tmp_path / "run")
    before, older = contents(run), store.newest_first(run)[1]
    says = "has checkpoints after round-000000.., which would be removed: choose another --out"
    with pytest.raises(UserError, match=says):
        simulated(f"{SHORT} --resume {older}", run)
    assert contents(run) == before
    simulated(f"{SHORT} --resume {older}", tmp_path / "branch")
    assert contents(run) == before
    simulated(f"{SHORT} --resume {store.newest_first(run)[0]} --iterations 44", run)
    assert rows_of(run)[-1]["iteration"] == 44


@pytest.mark.parametrize("what", ["manifest", "part"])
def test_a_checkpoint_that_cannot_be_read_now_is_kept(tmp_path: Path, what: str) -> None:
    """An answer of the disk, not of the file: it may be another one tomorrow."""
    run = simulated(f"{SHORT} --keep 9", tmp_path / "run")
    newest = store.newest_first(run)[0]
    if what == "manifest":
        path, target, says = newest / store.MANIFEST, "/proc/self/mem", "Input/output error"
    else:
        path = newest / store.part_name(0)
        target, says = path.name, "Too many levels of symbolic links"
    whole, before = path.read_bytes(), contents(run)
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(UserError, match=f"{newest.name} cannot be read now .*{says}.*try again"):
        simulated(f"{SHORT} --iterations 44 --resume auto", run)
    path.unlink()
    path.write_bytes(whole)
    assert contents(run) == before
    simulated(f"{SHORT} --iterations 44 --resume auto", run)


def test_the_mean_of_a_half_frozen_model(tmp_path: Path) -> None:
    """What is measured, exported and trained has the checkpoint's frozen part, not the task's."""
    run = simulated(FROZEN, tmp_path / "run")
    seed[0] = 1
    words = f"{FROZEN} --alpha 1e-9 --iterations 2 --resume {run} --resume-average"
    new = simulated(words, tmp_path / "new")
    a, b = rows_of(run)[-1], rows_of(new)[-1]
    assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-4)
    assert torch.equal(last(run)["frozen"]["1.weight"], last(new)["frozen"]["1.weight"])
    other = words.replace("half-frozen", "logistic")
    with pytest.raises(UserError, match="the checkpoint is of another model"):
        simulated(other, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_links_to_a_run_and_to_a_checkpoint(tmp_path: Path) -> None:
    run = simulated(f"{SHORT} --keep 9", tmp_path / "run")
    newest, *_, oldest = store.newest_first(run)
    (tmp_path / "all").symlink_to(run)
    (tmp_path / "latest").symlink_to(newest)
    (tmp_path / "first").symlink_to(oldest)
    assert export.newest(tmp_path / "all", print).r == export.newest(tmp_path / "latest", print).r
    simulated(f"{SHORT} --resume {tmp_path}/first", tmp_path / "branch")
    assert rows_of(tmp_path / "branch") == rows_of(run)
    simulated(f"{SHORT} --resume {tmp_path}/all", tmp_path / "other")
    out = tmp_path / "model.safetensors"
    export.main(export.Options(run=tmp_path / "latest", out=out))
    assert out.stat().st_size


def test_other_data_is_another_run(tmp_path: Path) -> None:
    write_wikitext(tmp_path / "data")
    write_bpe(tmp_path / "data")
    words = f"--task wikitext2-gpt2 --size tiny --seq 8 --data-dir {tmp_path}/data"

    def who() -> dict[str, object]:
        asked = parse(f"{words} --agents 2", tmp_path / "run")
        return identity("simulate", asked, make_topology(asked.options, 2), nn.Linear(1, 1))

    then = json.loads(json.dumps(who()))
    assert differences(who(), then) == ""
    text = tmp_path / "data" / "wikitext-2" / "train.txt"
    text.write_text(text.read_text() + "\nOne more word .\n")
    assert differences(who(), then).endswith("the data differs")
    # Those of older versions name no data, and where it came from.
    del then["data"]
    assert differences(who(), {**then, "download": False}) == ""
