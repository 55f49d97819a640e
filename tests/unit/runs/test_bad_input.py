"""Bad input in one process: one line, exit code 2, and what was there is as it was."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_oldsgd import cli, export, tasks
from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.training.options import TrainOptions
from support import faults
from support.bad_input import TASKS, TOPOLOGIES
from support.runs import SHORT, contents, simulated


@pytest.fixture(autouse=True)
def bad_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {**tasks.registry(), **TASKS}
    monkeypatch.setattr(tasks, "registry", lambda: known)


def run(*words: str | Path, on_step: Callable[[int], None] = lambda t: None) -> Path:
    *words, out = map(str, words)
    with cli.guard("simulate"):
        return simulated(" ".join([SHORT, *words]), Path(out), on_step=on_step)
    raise AssertionError("guard exits")


def line(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    with pytest.raises(SystemExit) as stop:
        run(*words)
    said = capsys.readouterr().err
    assert stop.value.code == code and said.count("\n") == 1 and said.startswith("simulate: ")
    return said


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topology_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, said = TOPOLOGIES[name]
    (tmp_path / name).write_text(text)
    shown = line(capsys, "--topology", tmp_path / name, tmp_path / "run")
    assert re.search(said, shown)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("tiny", "3 agents cannot share 2 training samples"),
        ("infinite-data", "training sample 7 holds NaN or infinity"),
        ("infinite-test", "test sample 3 holds NaN or infinity"),
        ("not-a-number", "bias holds NaN or infinity already"),
        ("no-parameters", "the model has no parameters that require a gradient"),
        ("two-types", "1.weight is torch.float64 on cpu, 0.weight is torch.float32"),
        ("two-devices", "1.weight is torch.float32 on meta"),
    ],
)
def test_models_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, said: str
) -> None:
    assert said in line(capsys, "--task", task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run(tmp_path / "run")
    (tmp_path / "link").symlink_to(path)
    before = contents(path)
    capsys.readouterr()
    assert "holds a run: add --resume auto" in line(capsys, path)
    assert "is a link" in line(capsys, "--overwrite", tmp_path / "link")
    assert "is a file" in line(capsys, "--overwrite", path / "config.json")
    assert "Not a directory" in line(capsys, path / "config.json" / "x")
    assert "choose one" in line(capsys, "--overwrite", "--resume", "auto", path)
    assert "seed is 1, was 0" in line(capsys, "--resume", "auto", "--seed", "1", path)
    late = ("--overwrite", "--algorithm", "lsgd", "--late", "reuse")
    assert "leaves out edges between neighbours" in line(capsys, *late, path)
    narrow = ("--overwrite", "--form", "gradient", "--wire", "bf16")
    assert "a narrower wire rounds that" in line(capsys, *narrow, path)
    assert contents(path) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is nearly full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(made, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.usefixtures("fast_disk")
def test_a_disk_without_room(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Full from the first checkpoint on: that one stays, the run ends with 5, and goes on later."""
    out, filler = small_disk / "run", small_disk / "filler"

    def fill_up() -> None:
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def fill_once(t: int) -> None:
        if faults.has_checkpoint(out) and not filler.exists():
            fill_up()

    with pytest.raises(SystemExit) as stop:
        run(out, on_step=fill_once)
    assert stop.value.code == 5
    said = capsys.readouterr()
    assert "No space left on device); the run goes on, the last valid one is round-" in said.err
    assert "test accuracy of the mean model" in said.out
    kept = export.newest(out, print)
    assert f"the last valid one is {kept.folder.name}" in said.err
    assert all((p / store.MANIFEST).exists() for p in store.newest_first(out))
    fill_up()  # what was lost has made room
    # No room for so much as the config of a second run.
    assert "cannot write to" in line(capsys, small_disk / "second")
    filler.unlink()
    run("--resume", "auto", out)
    assert export.newest(out, print).manifest["iteration"] == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--task no-loss", "measure() of NoLoss must return a loss"),
        ("--task no-test", "the test set of NoTest is empty"),
        (f"--iterations {10**30}", "--iterations must be at most 1e+15"),
        ("--alpha 1e31", "--alpha must be at most 1e+30"),
        ("--weight-decay 2e30", "--weight-decay must be at most 1e+30"),
        ("--momentum 1e300", "--momentum must be at most 1e+30"),
        ("--threads -1", "--threads must be at least 0, not -1"),
        ("--target nan", "--target must be positive, not nan"),
        ("--checkpoint-seconds nan", "--checkpoint-seconds must be at least 0, not nan"),
        ("--late-wait nan", "--late-wait must be at least 0, not nan"),
        ("--jitter nan", "--jitter must be at least 0"),
        ("--c nan", "c must be finite and at least 0"),
        ("--clip nan", "the gradient norm limit must be positive"),
    ],
)
def test_options_and_tasks_out_of_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert said in line(capsys, *words.split(), tmp_path / "run")


@pytest.mark.parametrize("words", ["--timeout nan", "--timeout inf", "--timeout -1"])
def test_a_timeout_is_a_time(words: str) -> None:
    with pytest.raises(UserError, match="--timeout must be at least 0"):
        cli.parse(TrainOptions, words.split())
