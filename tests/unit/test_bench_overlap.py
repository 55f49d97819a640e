"""`bench overlap` and `bench overhead`, small: what they print, not how fast anything is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from hpc_oldsgd.bench import overlap
from hpc_oldsgd.errors import UserError

Mpirun = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--model-bytes", "40004", "--grad-seconds", "0.002", "--rounds", "3", "--json")


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_overlap_on_three_ranks(mpirun: Mpirun) -> None:
    names = ["oldsgd", "ldsgd", "lsgd", "dsgd_cta"]
    done = mpirun(3, "-m", "hpc_oldsgd.bench", "overlap", *SMALL, "--algorithm", *names)
    printed = last_line(done)
    assert done.stdout.count('"results"') == 1  # rank 0 alone prints
    settings, results = printed["settings"], printed["results"]
    assert [r["algorithm"] for r in results] == names
    assert [r["tau"] for r in results] == [5, 5, 5, 1]
    assert settings["ranks"] == 3 and settings["model_bytes"] == 40004
    assert settings["t_g"] >= 0.002 and settings["t_c"] > 0
    for r in results:
        ideal = max(r["tau"] * settings["t_g"], settings["t_c"])
        assert r["ratio_to_ideal"] == pytest.approx(r["round_s"] / ideal)
        assert r["round_s"] >= r["tau"] * 0.002
        assert r["transfer_s"] > 0 and r["exposed_s"] > 0 and 0 <= r["hidden"] <= 1
        assert r["hidden"] == pytest.approx(max(0.0, 1 - r["exposed_s"] / r["transfer_s"]))


@pytest.mark.parametrize(
    "options",
    [
        ("--load", "spin", "--progress", "poll", "--wire", "bf16", "--engine", "python"),
        ("--staging", "host", "--topology", "one-peer-ring"),
    ],
)
def test_overlap_takes_every_kind_of_transport(mpirun: Mpirun, options: tuple[str, ...]) -> None:
    printed = last_line(mpirun(2, "-m", "hpc_oldsgd.bench", "overlap", *SMALL, *options))
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert printed["settings"][name[2:]] == value
    assert [r["algorithm"] for r in printed["results"]] == ["oldsgd", "ldsgd"]


def test_overlap_on_one_rank_sends_nothing(mpirun: Mpirun) -> None:
    printed = last_line(mpirun(1, "-m", "hpc_oldsgd.bench", "overlap", *SMALL))
    assert [r["hidden"] for r in printed["results"]] == [1.0, 1.0]


def test_overlap_explains_bad_input() -> None:
    for bad in ({"tau": 0}, {"rounds": 0}, {"model_bytes": 3}, {"algorithm": ()}):
        with pytest.raises(UserError):
            overlap.Options(**bad)


def test_overhead_on_two_ranks(mpirun: Mpirun) -> None:
    done = mpirun(2, "-m", "hpc_oldsgd.bench", "overhead", "--batch", "0", "--pairs", "2", "--json")
    printed = last_line(done)
    assert printed["settings"]["parameters"] == 9_225_610
    assert printed["ratio"] > 0 and printed["bare_s"] > 0 and printed["agent_s"] > 0
