"""A job that is stopped, requeued and resumed ends, to the bit, as one that never stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from support.slurm_cluster import ROOT, Cluster, Job

pytestmark = [pytest.mark.root, pytest.mark.timeout(700)]

TRAIN = ROOT / "jobs" / "train.slurm"
RUN = ("--task", "logistic", "--iterations", "2000", "--tau", "5", "--checkpoint-every", "20")
HOLD = Path(__file__).parent / "hold"
CLOCKED = ("time", "step_s", "samples_per_s", "transfer", "exposed", "hidden", "eval_s")


def under_way(job: Job, out: Path) -> None:
    """Some rows and a checkpoint are there, and half of the run is not done yet."""
    rows = out / "metrics.jsonl"
    job.until("row", lambda: rows.exists() and rows.read_text().count("\n") >= 3)
    assert not (out / "summary.json").exists(), "the run was not held"


def result(out: Path) -> tuple[list[dict[str, object]], dict[str, bytes]]:
    """The rows without what a clock says, and the models of all ranks at the end."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = max((out / "checkpoints").glob("round-*"))
    shards = {
        f"{file.name}: {name}": array.tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, array in load_file(file).items()
        if "window" not in name
    }
    assert len({key.split(":")[0] for key in shards}) == 2
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in rows], shards


def test_stopped_and_resumed_to_the_bit(cluster: Cluster, tmp_path: Path) -> None:
    def start(name: str, *options: str, **env: str) -> Job:
        if name != "whole":
            env["PYTHONPATH"] = f"{HOLD}:{os.environ.get('PYTHONPATH', '')}"
        return cluster.sbatch(
            tmp_path, "--ntasks=2", f"--job-name={name}", *options, TRAIN, *RUN,
            "--out", str(tmp_path / name), **env,
        )  # fmt: skip

    whole = start("whole", "--nodelist=n1")
    # What Slurm sends to the batch shell before the time limit, here through mpirun's hands.
    signalled = start("signalled", "--nodelist=n1", HPC_OLDSGD_LAUNCHER="mpirun")
    preempted = start("preempted", "--nodelist=n2", "--partition=low")
    # Requeued without a warning: from the last checkpoint that was due.
    killed = start("killed", "--nodelist=n2", "--partition=scrap")
    under_way(signalled, tmp_path / "signalled")
    cluster.command("scancel", "--batch", "--signal=USR1", signalled.number)
    under_way(preempted, tmp_path / "preempted")
    under_way(killed, tmp_path / "killed")
    cluster.sbatch(
        tmp_path, "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=true"
    ).wait()
    expected = None
    for job, name in ((whole, "whole"), (signalled, "signalled"), (preempted, "preempted"),
                      (killed, "killed")):  # fmt: skip
        log = job.wait()
        assert log.count(", start 1\n") == 1  # the log of the first start is kept
        assert log.count(", start 2\n") == (0 if name == "whole" else 1), log
        stops = "stopped: the job is requeued" in log
        assert stops == (name in ("signalled", "preempted")), log
        rows, shards = result(tmp_path / name)
        if expected is None:
            expected = rows, shards
        assert rows == expected[0], name
        assert shards == expected[1], name
