"""The comparison with DDP and others: its command lines, tables and figures, and a tiny run."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth
from benchmarks.launch import mpirun, rate
from benchmarks.peers import report
from benchmarks.peers.entries import ENTRIES
from hpc_oldsgd import cli
from hpc_oldsgd.errors import UserError
from support import ROOT


def row(name: str, step_s: float, **more: Any) -> dict[str, Any]:
    ideal = {"ideal_s": 0.2, "ratio_to_ideal": step_s / 0.2, "t_c": 0.4, "cpu_s": 0.01}
    spread = {"step_min_s": step_s, "step_max_s": step_s + 0.01}
    return {"entry": name, "graph": "ring", "wire": "fp32", "step_s": step_s, "ours": True,
            "blocking": False, **ideal, **spread, **more}  # fmt: skip


def run() -> dict[str, Any]:
    settings = {"load": "sleep", "ranks": 4, "t_g": 0.2, "bytes": 4e7, "tau": 5, "ratio": 1.0,
                "network": "1693mbit", "mpi": "MPICH", "torch": "2"}  # fmt: skip
    results = [
        row("ddp", 0.5, graph="all-reduce"),
        row("ldsgd", 0.3, blocking=True),
        row("naive isend/irecv", 0.22),
        row("oldsgd", 0.21),
        row("oldsgd, one peer, bf16", 0.2, graph="one-peer-ring", t_c=0.1),
    ]
    return {"settings": settings, "results": results, "skipped": []}


def test_a_message_takes_the_seconds_its_rate_was_made_for() -> None:
    assert rate(40e6, 1.0) == "338.6mbit"
    assert float(rate(1e6, 0.1).removesuffix("mbit")) == pytest.approx(8 * 10 * 1.058, abs=0.05)


def test_table_and_goals_say_what_was_measured() -> None:
    text = report.table({**run(), "skipped": [{"entry": "decent-dp", "reason": "not there"}]})
    assert "| oldsgd | ring | fp32 | 0.210 | 0.210 to 0.220 | 0.200 | 1.050 | 2.38x |" in text
    assert "Left out: decent-dp (not there)." in text
    goals = "\n".join(report.goals(run()))
    assert "oldsgd is at 1.050 of its ideal" in goals
    assert "2.38x faster than ddp (goal 2.4x)" in goals
    unshaped = {**run(), "settings": {**run()["settings"], "ratio": 0.0}}
    assert "2.38x faster than ddp" in report.goals(unshaped), "no goal for the network that is here"
    assert "naive isend/irecv, 1.048 of oldsgd's time" in goals
    assert "t_c 0.250 of oldsgd's, step 1.000 of pure compute" in goals
    assert "1.50x faster than ldsgd, the best blocking" in goals
    assert report.goals({**run(), "results": []}) == []
    both = report.beside([run(), {**run(), "results": run()["results"][:-1]}])
    assert "| oldsgd | ring | fp32 | 0.210 (0.210 to 0.220) | 1.050 | 0.210" in both
    assert len({line.count("|") for line in both.splitlines()}) == 1
    assert both.splitlines()[-1].count(" - |") == 3  # the contestant that the second run lacks


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (made,) = report.figure([run(), run(), run()], tmp_path / "peers")
    assert made.stat().st_size > 5000
    scan = vars(growth.SCANS["agents"])
    rows = [{"agents": n, "algorithm": name, "round_s": 1.0, "memory_bytes": 1e6,
             **growth.law(name, n, 2, 1000, growth.SCANS["agents"])}
            for n in (2, 4) for name in scan["algorithms"]]  # fmt: skip
    growth.figure({"agents": {"scan": scan, "results": rows}}, tmp_path / "growth")
    assert (tmp_path / "growth.png").exists()
    assert "| 4 | ldsgd | 1.000 |" in growth.table("agents", {"scan": scan, "results": rows})


def test_laws_of_growth() -> None:
    scan = growth.Scan((2,), 4, 8 * growth.WIRE, 0.1)  # 1 MB a second
    assert growth.law("oldsgd", 4, 2, 1_000_000, scan) == {"law_s": 8.0, "law_bytes": 16e6}
    assert growth.law("oldsgd", 4, 2, 1_000, scan)["law_s"] == pytest.approx(0.5)
    assert growth.law("ldsgd", 4, 2, 1_000_000, scan)["law_s"] == pytest.approx(8.5)
    assert growth.law("lsgd", 4, 2, 1_000_000, scan)["law_s"] == pytest.approx(6.5)


def test_wrong_input_is_one_line() -> None:
    from benchmarks.peers import worker

    with pytest.raises(UserError, match="No contestant is called nccl"):
        cli.parse(worker.Options, ["--only", "nccl"])
    with pytest.raises(UserError, match="at least 1"):
        cli.parse(worker.Options, ["--tau", "0"])


def test_a_host_whose_name_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers import worker

    def unknown(name: str) -> str:
        raise socket.gaierror

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert worker.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert worker.own_address() == "127.0.0.1"


def test_bench_says_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    everything = importlib.import_module("benchmarks.__main__")
    names = {part.words[0] for part in everything.PARTS}
    assert {"benchmarks.peers", "benchmarks.accuracy", "benchmarks.growth"} <= names
    here = everything.Part("Here", ("this",))  # a module that prints the Zen and imports no torch
    away = everything.Part("Away", ("benchmarks.peers",), slow_net=True)
    monkeypatch.setattr(everything, "PARTS", (here, away))
    monkeypatch.setattr(everything, "slow_net_works", lambda: False)
    assert everything.main(everything.Options()) == 0
    printed = capfd.readouterr().out
    assert "Beautiful is better than ugly" in printed
    assert "Left out: Away: needs a slow network" in printed
    monkeypatch.setattr(everything, "PARTS", (everything.Part("Gone", ("no_such_module",)),))
    assert everything.main(everything.Options()) == 1
    assert "Failed: Gone." in capfd.readouterr().out


def test_all_contestants_run_on_two_ranks() -> None:
    command = [mpirun(), "-n", "2", sys.executable, "-m", "benchmarks.peers.worker", "--json"]
    small = ["--grad-seconds", "0.002", "--model-bytes", "40004", "--rounds", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *small], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    names = [r["entry"] for r in printed["results"] + printed["skipped"]]
    assert sorted(names) == sorted(e.name for e in ENTRIES)
    for r in printed["results"]:
        assert r["step_s"] >= 0.0019, r
        # The two ranks started 1 apart, and have agreed; 8 and 4 bits bring them closer and closer.
        assert r["spread"] <= (0.01 if r["wire"].startswith("int") else 0.0), r
