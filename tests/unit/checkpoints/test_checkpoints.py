"""Checkpoints on the disk: what is written, what is trusted, what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_oldsgd import algorithms, export
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import Diverged, Stopped, UserError
from hpc_oldsgd.runs import folder as run_folder
from hpc_oldsgd.runtime import part_file
from hpc_oldsgd.runtime.part_file import Unusable
from hpc_oldsgd.training.signals import Inbox
from support.bits import same
from support.runs import SHORT, crash, last, rows_of, simulated

pytestmark = pytest.mark.usefixtures("fast_disk")


def test_a_tree_survives_its_file(tmp_path: Path) -> None:
    tree = {
        "x": torch.randn(7).bfloat16(), "half": torch.randn(3, 5).half(), 3: (1, [2.5, None]),
        "deep": {"step": torch.tensor(2.0), "empty": torch.zeros(0, 3), "flag": torch.ones(3) > 0},
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "big": 2**127, "inf": float("inf"), "text": "é\n", "n": torch.arange(5),
    }  # fmt: skip
    written = part_file.write(tmp_path / "a", tree)
    part_file.check(tmp_path / "a", written)
    assert same(part_file.read(tmp_path / "a"), tree)
    with pytest.raises(TypeError, match=r"deep\.0 is a object"):
        part_file.write(tmp_path / "b", {"deep": [object()]})


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "manifest", "no manifest"])
def test_damage_is_noticed_and_the_one_before_used(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(SHORT, tmp_path / "run")
    newest, before = store.newest_first(tmp_path / "run")
    shard, manifest = newest / "rank-00000.safetensors", newest / "manifest.json"
    content = bytearray(shard.read_bytes())
    if damage == "cut":
        shard.write_bytes(content[:-1])
    elif damage == "flip":
        content[-5] ^= 1
        shard.write_bytes(content)
    elif damage == "gone":
        shard.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text().replace("20", "21", 1))
    else:
        manifest.unlink()
    assert export.newest(tmp_path / "run", print).folder == before
    assert f"{newest.name} is not usable" in capsys.readouterr().out
    # A resumed run says so too, goes on from there, and comes to the same end.
    simulated(f"{SHORT} --resume auto", tmp_path / "run")
    assert f"goes on from round {int(before.name[6:])}" in capsys.readouterr().err
    assert store.find(newest).r == 20


def test_nothing_usable_is_a_decision_for_the_user(tmp_path: Path) -> None:
    simulated(f"{SHORT} --keep 1", tmp_path / "run")
    (only,) = store.newest_first(tmp_path / "run")
    (only / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* is usable .*0 bytes instead of"):
        simulated(f"{SHORT} --resume auto", tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == 7  # nothing of the run was touched


@pytest.mark.parametrize("name", algorithms.names())
def test_resumed_is_the_run_that_never_stopped(tmp_path: Path, name: str) -> None:
    """Jitter draws from the clock's own generator; momentum and AdamW have state of their own."""
    k = algorithms.names().index(name)
    optimizer = ["", "--momentum 0.9", "--optimizer adamw"][k % 3]
    words = f"{SHORT} --algorithm {name} {optimizer} --jitter 0.3 --c 1.7 --slow 1:1.5"
    if name.startswith("dsgd"):
        words = words.replace("--tau 2 ", "")
    simulated(words, tmp_path / "whole")
    crash(words, tmp_path / "cut")
    simulated(f"{words} --resume auto", tmp_path / "cut")
    a, b = last(tmp_path / "whole"), last(tmp_path / "cut")
    assert a["runner"]["t"] == 40 and same(a["runner"], b["runner"])
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")


def test_batchnorm_kept_local_and_the_gradient_form_resume(tmp_path: Path) -> None:
    words = "--batchnorm --buffers local --form gradient --alpha 0.05 --eval-samples 50"
    words += " --iterations 24 --tau 2 --agents 2 --eval-every 3 --checkpoint-every 2"
    simulated(words, tmp_path / "whole")
    crash(words, tmp_path / "cut", after=14)
    simulated(f"{words} --resume auto", tmp_path / "cut")
    a, b = last(tmp_path / "whole"), last(tmp_path / "cut")
    assert same(a["runner"], b["runner"]) and same(a["models"], b["models"])
    assert any("running_mean" in name for name in a["models"][0])
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")


def test_the_last_ones_are_kept_and_links_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    run = tmp_path / "run"
    simulated(f"{SHORT} --keep 3", run)
    assert len(store.newest_first(run)) == 3
    (run / "checkpoints" / "round-00000001").symlink_to(elsewhere)
    store.prune(run, 1)
    assert [p.name for p in store.newest_first(run)] == ["round-00000020"]
    assert (elsewhere / "precious").exists()
    (run / "checkpoints").rename(tmp_path / "moved")
    (run / "checkpoints").symlink_to(tmp_path / "moved")
    store.prune(run, 0)
    run_folder.prepare(run, overwrite=True)
    assert (tmp_path / "moved" / "round-00000020" / "manifest.json").exists()


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    simulated(SHORT, tmp_path / "run")
    for change, said in {
        "--seed 1": "seed is 1, was 0",
        "--tau 4": "tau is 4, was 2",
        "--algorithm ldsgd": "algorithm is ldsgd, was oldsgd",
        "--task digits": "task is digits, was logistic.*the model differs",
        "--topology complete --weights lazy": "the mixing weights differ",
        "--agents 4": "of 3 agents, not 4: start as many, or add --resume-average",
    }.items():
        with pytest.raises(UserError, match=said):
            simulated(f"{SHORT} {change} --resume auto", tmp_path / "run")
    with pytest.raises(UserError, match="--resume auto to go on with it"):
        simulated(SHORT, tmp_path / "run")
    with pytest.raises(UserError, match="no such folder"):
        simulated(f"{SHORT} --resume {tmp_path}/none", tmp_path / "run")


def test_average_starts_other_agents_from_the_mean(tmp_path: Path) -> None:
    simulated(SHORT, tmp_path / "run")
    words = SHORT.replace("--agents 3", "--agents 5 --resume-average")
    simulated(f"{words} --resume {tmp_path}/run", tmp_path / "new")
    first = rows_of(tmp_path / "new")[0]
    assert first["round"] == 3 and len(first["agent_loss"]) == 5
    assert first["batch_loss"] < rows_of(tmp_path / "run")[-1]["batch_loss"] + 0.05
    with pytest.raises(UserError, match="choose another --out"):
        simulated(f"{words} --resume {tmp_path}/run", tmp_path / "run")


def test_longer_and_with_another_alpha(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated(SHORT, tmp_path / "run")
    simulated(f"{SHORT} --iterations 50 --alpha 0.02 --resume auto", tmp_path / "run")
    assert "with alpha 0.02 instead of 0.01" in capsys.readouterr().err
    groups = last(tmp_path / "run")["runner"]["optimizers"][0]["param_groups"]
    assert groups[0]["lr"] == 0.02
    assert [row["round"] for row in rows_of(tmp_path / "run")] == [3, 6, 9, 12, 15, 18, 21, 24, 25]


def test_from_an_old_checkpoint_into_another_folder(tmp_path: Path) -> None:
    simulated(f"{SHORT} --keep 20", tmp_path / "run")
    old = store.newest_first(tmp_path / "run")[-1]
    simulated(f"{SHORT} --resume {old}", tmp_path / "branch")
    assert rows_of(tmp_path / "branch") == rows_of(tmp_path / "run")
    assert same(last(tmp_path / "branch")["runner"], last(tmp_path / "run")["runner"])
    assert len(store.newest_first(tmp_path / "run")) > 2


def test_a_branch_has_a_checkpoint_of_its_own_at_once(tmp_path: Path) -> None:
    """Killed before the next one is due it goes on from there, and keeps the rows it came with."""
    rare = SHORT.replace("--checkpoint-every 2", "--checkpoint-every 0 --checkpoint-seconds 0")
    simulated(SHORT, tmp_path / "run")
    longer = f"{rare.replace('--iterations 40', '--iterations 80')} --resume {tmp_path / 'run'}"
    crash(longer, tmp_path / "branch", after=60)
    assert [found.name for found in store.newest_first(tmp_path / "branch")] == ["round-00000020"]
    simulated(f"{longer.partition(' --resume')[0]} --resume auto", tmp_path / "branch")
    rows = rows_of(tmp_path / "branch")
    assert [row["iteration"] for row in rows][-1] == 80
    assert rows[: len(rows_of(tmp_path / "run")) - 1] == rows_of(tmp_path / "run")[:-1]


def test_divergence_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    words = SHORT.replace("--checkpoint-every 2", "--checkpoint-every 1")
    with pytest.raises(Diverged, match=r"near iteration 4.*good checkpoint is .*round-00000000"):
        simulated(f"{words} --alpha 1e30", tmp_path / "early")
    assert [p.name for p in store.newest_first(tmp_path / "early")] == ["round-00000000"]
    # The loss grows for a while before it counts as exploded.
    with pytest.raises(Diverged, match=r"the last good checkpoint is .*round-") as raised:
        simulated(f"{words} --alpha 40 --iterations 4000 --weight-decay 0.1", tmp_path / "late")
    found = export.newest(tmp_path / "late", print)
    assert str(found.folder) in str(raised.value)
    assert bool(torch.isfinite(found.read(0)["runner"]["x"]).all())


@pytest.fixture
def signals() -> Iterator[None]:
    """The handlers of before come back."""
    before = {s: signal.getsignal(s) for s in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for s, handler in before.items():
        signal.signal(s, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_stops_at_a_boundary(tmp_path: Path, number: signal.Signals) -> None:
    inbox = Inbox("stop")
    inbox.install()

    def interrupt(t: int) -> None:
        if t == 21:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped, match=r"after iteration 24 of 40.*round-00000012") as stopped:
        simulated(SHORT, tmp_path / "run", inbox, on_step=interrupt)
    assert stopped.value.exit_code == 75
    simulated(f"{SHORT} --resume auto", tmp_path / "run")
    simulated(SHORT, tmp_path / "whole")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.usefixtures("signals")
def test_a_signal_may_only_ask_for_a_checkpoint(tmp_path: Path) -> None:
    inbox = Inbox("continue")
    inbox.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    words = SHORT.replace("--checkpoint-every 2", "--keep 5")
    simulated(words, tmp_path / "run", inbox)
    end, asked_for, start = (store.find(p).r for p in store.newest_first(tmp_path / "run"))
    # Asked for before the first vote, counted at the second, taken once the start's is written.
    assert start == 0 and 2 <= asked_for < end == 20


def test_the_timer_saves(tmp_path: Path) -> None:
    words = SHORT.replace("--checkpoint-every 2", "--keep 9 --checkpoint-seconds 0.01")
    simulated(words, tmp_path / "run", on_step=lambda t: time.sleep(0.002))
    assert len(store.newest_first(tmp_path / "run")) > 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"sha256": 1, "manifest": 2}', "\x00"])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(Unusable):
        store.find(tmp_path)
