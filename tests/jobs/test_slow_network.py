"""On a network that is really slow: OLDSGD hides its messages, LDSGD does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.launch import launch, slow_net_works
from hpc_oldsgd.bench import SLOW_NET
from support import ROOT

OWN = Path(sys.prefix)

MPIRUNS = [
    pytest.param(
        path,
        id=name,
        marks=pytest.mark.skipif(not path.exists(), reason=f"there is no {path}"),
    )
    for name, path in (
        ("own", Path(os.environ.get("MPIRUN", OWN / "bin" / "mpirun"))),
        ("openmpi", OWN / "openmpi" / "bin" / "mpirun"),
    )
]


@pytest.mark.root
@pytest.mark.skipif(
    not slow_net_works(), reason="slow_net.sh needs root, tc and network namespaces"
)
@pytest.mark.parametrize("mpirun", MPIRUNS)
def test_oldsgd_hides_what_ldsgd_waits_for(mpirun: Path) -> None:
    # One message of 1 MB takes 0.17 s at 50 Mbit/s, 5 gradients 0.5 s: a busy machine may dawdle.
    small = ["--model-bytes", 1_000_000, "--grad-seconds", 0.1, "--rounds", 5, "--json"]
    printed = launch("hpc_oldsgd.bench", ["overlap", *small], 2, "50mbit", by=str(mpirun))
    oldsgd, ldsgd = printed["results"]
    assert printed["settings"]["network"] == "50mbit"
    # The bytes did go over the slow link. A quarter of them may leave in a burst after a pause, so
    # it takes 0.12 s at least. In shared memory it would take 1 ms.
    assert printed["settings"]["t_c"] > 0.05
    assert oldsgd["hidden"] > 0.6
    assert ldsgd["hidden"] < 0.3


@pytest.mark.root
@pytest.mark.skipif(
    not slow_net_works(), reason="slow_net.sh needs root, tc and network namespaces"
)
def test_networks_leave_nothing_behind_and_do_not_meet() -> None:
    names = [str(SLOW_NET), "ranks", "2", "1gbit", "sh", "-c", "ip netns list | sort; sleep 1"]
    both = [subprocess.Popen(names, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        out, _ = one.communicate(timeout=60)
        assert one.returncode == 0
        assert [line.split()[0] for line in out.splitlines()] == ["rank0", "rank1"]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "rank0" not in left


@pytest.mark.root
@pytest.mark.skipif(
    not slow_net_works(), reason="slow_net.sh needs root, tc and network namespaces"
)
def test_seconds_to_a_target_are_measured_once(tmp_path: Path) -> None:
    asked = "--ranks 2 --ratio 1 --repeats 1 --tau 5 --target 0.4 --limit 20 --give-up 0"
    command = [sys.executable, "-m", "benchmarks.accuracy", *asked.split(), "--entry", "oldsgd",
               "ddp", "--every", "10", "--pause", "0.5", "--output", str(tmp_path)]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    first, again = (
        subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
        for _ in range(2)
    )
    assert first.returncode == 0, first.stderr
    assert "0 of 2 cells are done" in first.stderr
    rows = [line for line in first.stdout.splitlines() if line.startswith(("| oldsgd", "| ddp"))]
    assert len(rows) == 2 and "not in" not in first.stdout
    assert (tmp_path / "accuracy-digits.png").exists()
    assert again.stdout == first.stdout
    assert "ranks" not in again.stderr, "nothing is started again"
