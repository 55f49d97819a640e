"""`bench overlap` and `bench overhead`, small: what they print, not how fast anything is."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

from hpc_oldsgd.bench import memory, overlap
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.transport import base

SMALL = ("overlap", "--model-bytes", "40004", "--grad-seconds", "0.002", "--rounds", "3", "--json")
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(
    comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    """The command line, in the processes of the tests; the JSON of its last line, on all ranks."""

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["hpc_oldsgd.bench", *words])
        runpy.run_module("hpc_oldsgd.bench", run_name="__main__")
        printed = capsys.readouterr().out
        assert bool(printed) == (comm.rank == 0)  # one rank alone prints
        lines: list[str] = comm.bcast(printed.splitlines())
        assert sum('"settings"' in line for line in lines) == 1
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    return run


@pytest.mark.mpi(min_size=3)
@pytest.mark.max_ranks(4)
def test_overlap(comm: MPI.Comm, bench: Bench) -> None:
    names = ["oldsgd", "ldsgd", "lsgd", "dsgd_cta"]
    printed = bench(*SMALL, "--algorithm", *names)
    settings, results = printed["settings"], printed["results"]
    assert [r["algorithm"] for r in results] == names
    assert [r["tau"] for r in results] == [5, 5, 5, 1]
    assert settings["ranks"] == comm.size and settings["model_bytes"] == 40004
    assert settings["t_g"] >= 0.002 and settings["t_c"] > 0
    for r in results:
        ideal = max(r["tau"] * settings["t_g"], settings["t_c"])
        assert r["ratio_to_ideal"] == pytest.approx(r["round_s"] / ideal)
        assert r["round_s"] >= r["tau"] * 0.002
        assert r["transfer_s"] > 0 and r["exposed_s"] > 0 and 0 <= r["hidden"] <= 1
        assert r["hidden"] == pytest.approx(max(0.0, 1 - r["exposed_s"] / r["transfer_s"]))


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(2)
def test_overlap_of_more_rounds_than_are_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "RECORDS_KEPT", 2)
    (ldsgd,) = bench(*SMALL, "--rounds", "9", "--algorithm", "ldsgd")["results"]
    assert ldsgd["transfer_s"] > 0 and ldsgd["exposed_s"] > 0 and ldsgd["hidden"] < 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        ("--load", "spin", "--progress", "poll", "--wire", "bf16", "--engine", "python"),
        ("--staging", "host", "--topology", "one-peer-ring", "--late", "reuse", "--wire", "int4"),
    ],
)
def test_overlap_takes_every_kind_of_transport(bench: Bench, options: tuple[str, ...]) -> None:
    printed = bench(*SMALL, *options)
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert printed["settings"][name[2:]] == value
    assert [r["algorithm"] for r in printed["results"]] == ["oldsgd", "ldsgd"]


@pytest.mark.max_ranks(1)
def test_overlap_on_one_rank_sends_nothing(bench: Bench) -> None:
    assert [r["hidden"] for r in bench(*SMALL)["results"]] == [1.0, 1.0]


def test_overlap_explains_bad_input() -> None:
    for bad in ({"tau": 0}, {"rounds": 0}, {"model_bytes": 3}, {"algorithm": ()}):
        with pytest.raises(UserError):
            overlap.Options(**bad)  # type: ignore[arg-type]


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(2)
def test_overhead(bench: Bench) -> None:
    printed = bench("overhead", "--batch", "0", "--pairs", "2", "--json")
    assert printed["settings"]["parameters"] == 9_225_610
    assert printed["ratio"] > 0 and printed["bare_s"] > 0 and printed["agent_s"] > 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(4)
def test_memory_of_fragments(comm: MPI.Comm, capsys: pytest.CaptureFixture[str]) -> None:
    """Resident memory is too coarse to be tested; that every row is there is not."""
    memory.main(memory.Options(algorithm=("oldsgd",), side=1000, rounds=2, json=True))
    said = capsys.readouterr().out
    if comm.rank == 0:
        rows = {row["algorithm"]: row for row in json.loads(said.splitlines()[-1])["results"]}
        degree = min(2, comm.size - 1)
        assert list(rows) == ["oldsgd", "oldsgd P=5", "oldsgd + metrics", "oldsgd + checkpoint"]
        assert rows["oldsgd"]["computed"] == degree + 1
        assert rows["oldsgd P=5"]["computed"] == pytest.approx((degree + 1) / 5)
        assert "oldsgd P=5" in said
