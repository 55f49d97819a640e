"""The job scripts without a Slurm: its variables are set by hand, and commands are stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hpc_oldsgd.launch import device
from support import ROOT

JOBS = ROOT / "jobs"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "3"}
SLURM |= {"HPC_OLDSGD_VENV": "", "HPC_OLDSGD_MPI": "pmi2", "SLURM_JOB_PARTITION": "p"}


def bash(script: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HPC_OLDSGD"))}
    clean |= {**SLURM, "HPC_OLDSGD_HOME": str(JOBS.parent), **env}
    return subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=clean, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("given", "index"),
    [
        ({"SLURM_LOCALID": "3"}, 3),
        ({"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "2"}, 2),
        ({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({}, 0),
    ],
)
def test_mpirun_inside_a_job_gives_each_rank_its_gpu(
    given: dict[str, str], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script has SLURM_LOCALID=0, and mpirun passes it on to all ranks."""
    for name in ("SLURM_LOCALID", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert device.choose_device("auto").index == index


@pytest.mark.parametrize(("given", "told"), [("", False), ("-1", False), ("0", True)])
def test_a_gpu_that_torch_does_not_see_is_told_of(
    given: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert bool(device.unseen_gpu(torch.device("cpu"))) == told
    assert not device.unseen_gpu(torch.device("cuda"))


@pytest.mark.parametrize(
    ("per_node", "all_tasks", "n", "nodes"),
    [("4(x2),1", 9, 4, 1), ("4(x2),1", 9, 5, 2), ("4(x2),1", 9, 9, 3), ("8,1", 9, 9, 2),
     ("16(x2)", 32, 16, 1), ("1(x3)", 3, 2, 2)],
)  # fmt: skip
def test_a_step_asks_for_the_nodes_that_hold_it(
    per_node: str, all_tasks: int, n: int, nodes: int, tmp_path: Path
) -> None:
    script = f'source {JOBS}/env.sh; tasks {n}; echo "${{start[@]}}"'
    given = {"SLURM_TASKS_PER_NODE": per_node, "SLURM_NTASKS": str(all_tasks)}
    assert f"--ntasks={n} --nodes={nodes} " in bash(script, tmp_path, **given).stdout


def test_one_algorithm_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """Not in this submission, and not in the next one with the same folder."""
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && shift 3 && echo "$@" && exit\n'
        'echo "ran $4"\n[ "$4" = bad ] && exit 4\n'
        'while [ "$1" != --out ]; do shift; done\nmkdir -p "$2" && touch "$2/summary.json"\n'
    )
    stub.chmod(0o755)
    array = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_JOB_ID": "7"}
    array |= {"HPC_OLDSGD_ALGORITHMS": "a bad b", "HPC_OLDSGD_OUT": str(tmp_path / "out")}
    array |= {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    for expected in (["ran a", "ran bad", "ran b"], ["ran bad"]):
        done = bash(f"source {JOBS}/compare.slurm", tmp_path, **array)
        assert done.returncode == 4, done.stderr
        assert [line for line in done.stdout.splitlines() if "ran" in line] == expected
        assert "failed with exit code 4" in done.stderr


@pytest.mark.parametrize(
    ("ends", "member", "requeued"),
    [("exit 75", {}, "7"), ("exit 10", {}, "7"), ("exit 138", {}, "7"), ("exit 3", {}, ""),
     ("exit 75", {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "7"),
     ("exit 75", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2")],
)  # fmt: skip
def test_a_signalled_job_is_requeued_and_no_other(
    ends: str, member: dict[str, str], requeued: str, tmp_path: Path
) -> None:
    """Whether its ranks had their handlers already or not, and alone of its array."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    (tmp_path / "scontrol").chmod(0o755)
    waits = f'trap "{ends}" USR1; kill -USR1 $PPID; for _ in {{1..1000}}; do sleep 0.02; done'
    script = f"source {JOBS}/env.sh; resumable bash -c '{waits}'; exit $code"
    done = bash(script, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", **member)
    assert done.returncode == (75 if requeued else 3)
    assert (f"scontrol requeue {requeued}\n" in done.stdout) == bool(requeued)


@pytest.mark.parametrize("signal", [139, 11])  # as srun, and as MPICH's mpirun say it
@pytest.mark.parametrize(("failures", "code"), [(0, 0), (1, 0), (2, 0), (3, 139)])
def test_a_start_that_a_signal_ended_is_tried_again(
    failures: int, code: int, signal: int, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")  # sweeps
    (tmp_path / "srun").chmod(0o755)
    crashes = f"echo begins; echo >>starts; (($(wc -l <starts) > {failures})) || exit {signal}"
    script = f"source {JOBS}/env.sh; resumable bash -c '{crashes}'; exit $code"
    done = bash(script, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == code
    assert done.stdout.count("begins") == min(failures, 2) + 1
    assert done.stdout.count("once more") == min(failures, 2)


def stub(path: Path, text: str) -> str:
    """A command of this name for a script; the PATH with it."""
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


def test_bad_input_ends_the_job_at_once(tmp_path: Path) -> None:
    """Found by one process before any task starts, or by the first run; not once a size."""
    stub(tmp_path / "srun", 'echo "srun $*"')
    given = {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4", "HPC_OLDSGD_SIZES": "2 4"}
    given["PATH"] = stub(tmp_path / "python", 'echo "$*"; exit 2')
    for name in ("scaling_ring", "train", "gpt2_wikitext2"):
        done = bash(f"source {JOBS}/{name}.slurm --seed 1", tmp_path, **given)
        assert done.returncode == 2 and "srun" not in done.stdout, name
        assert done.stdout.count("hpc_oldsgd.train") == 1, name
        agents = "2 4" if name == "scaling_ring" else "4"
        assert f"--check-agents {agents} --check" in done.stdout, name
    for name in ("doctor", "overlap_bench"):
        done = bash(f"source {JOBS}/{name}.slurm --topology x", tmp_path, **given)
        assert done.returncode == 2 and "srun" not in done.stdout, name
        assert done.stdout.endswith("--topology x --check-agents 4\n"), done.stdout
    script = f"source {JOBS}/env.sh; once a python x; once b python x"
    done = bash(script, tmp_path, **given)
    assert done.returncode == 2 and done.stdout.count("--out") == 1
    assert "nothing more is started" in done.stderr


@pytest.mark.parametrize(
    ("does", "preempted", "requeued"),
    [("", "", False), ("", "PreemptTime=2026-01-01", True),
     ("mkdir -p out/checkpoints/round-5; touch out/checkpoints/round-5/manifest.json", "", True)],
)  # fmt: skip
def test_a_start_that_adds_no_checkpoint_is_the_last(
    does: str, preempted: str, requeued: bool, tmp_path: Path
) -> None:
    """Else a job whose warning comes too early would be requeued for ever."""
    path = stub(tmp_path / "scontrol", f'echo "scontrol $*"; echo {preempted}')
    (tmp_path / "out" / "checkpoints" / "round-0").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "round-0" / "manifest.json").touch()
    stub(tmp_path / "work", f"{does}\nexit 75")
    script = f"source {JOBS}/env.sh; resumable work --out out; exit $code"
    done = bash(script, tmp_path, PATH=path)
    assert ("scontrol requeue 7" in done.stdout) == requeued
    assert done.returncode == (75 if requeued else 2)
    assert ("goes on from its checkpoint" in done.stdout) == bool(does)
    assert requeued or "before it added a checkpoint: the job is not requeued" in done.stderr


@pytest.mark.parametrize(
    ("limit", "warning", "refused"),
    [("2:00", "", True), ("2:01", "", False), ("1:00", "30", False), ("1-00:00:00", "", False),
     ("08:09:00", "", False), ("UNLIMITED", "", False), ("30", "", True)],
)  # fmt: skip
def test_a_limit_that_is_no_longer_than_the_warning_is_refused(
    limit: str, warning: str, refused: bool, tmp_path: Path
) -> None:
    given = {"PATH": stub(tmp_path / "squeue", f"echo {limit}"), "HPC_OLDSGD_WARNING": warning}
    stub(tmp_path / "python", "exit 9")
    done = bash(f"source {JOBS}/train.slurm", tmp_path, **given)
    assert done.returncode == (2 if refused else 9)
    assert ("is not longer than the 120 s of warning" in done.stderr) == refused


def test_what_the_program_itself_ends_is_not_tried_again(tmp_path: Path) -> None:
    script = f"source {JOBS}/env.sh; resumable bash -c 'echo begins; exit 4'; exit $code"
    done = bash(script, tmp_path)
    assert done.returncode == 4 and done.stdout.count("begins") == 1


@pytest.mark.parametrize(
    ("parent", "ends", "cancels"),
    [("slurmstepd", "os.kill(os.getpid(), 9)", True), ("slurmstepd", "sys.exit(2)", False),
     ("slurmstepd", "sys.exit(3)", False), ("slurmstepd", "1 / 0", False),
     ("mpirun", "os.kill(os.getpid(), 9)", False)],
)  # fmt: skip
def test_a_killed_rank_ends_its_step(parent: str, ends: str, cancels: bool, tmp_path: Path) -> None:
    """One that ends by itself, whatever its exit code, does not."""
    path = stub(tmp_path / "scancel", f'echo "$*" >{tmp_path}/cancelled')
    (tmp_path / parent).symlink_to("/bin/bash")  # its name, as the rank sees its parent
    module = ROOT / "hpc_oldsgd" / "launch" / "dead_rank.py"
    code = f"import os, sys, runpy; runpy.run_path({str(module)!r})['watch'](); {ends}"
    given = {"SLURM_STEP_ID": "3", "PATH": path, "CODE": code}
    bash(
        f"{tmp_path / parent} -c '{sys.executable} -c \"$CODE\"; wait'; sleep 0.2",
        tmp_path,
        **given,
    )
    told = tmp_path / "cancelled"
    if cancels:
        for _ in range(300):
            if told.exists() and told.read_text():
                break
            time.sleep(0.1)
        assert told.read_text() == "--signal=KILL 7.3\n"
    else:
        assert not told.exists()


@pytest.mark.parametrize("name", ["HPC_OLDSGD_RESTARTS", "HPC_OLDSGD_RETRIES"])
def test_a_count_that_is_none_is_one_line(name: str, tmp_path: Path) -> None:
    done = bash(f"source {JOBS}/env.sh", tmp_path, **{name: "many"})
    assert done.returncode == 2 and f"{name} is a whole number, not many" in done.stderr


def test_srun_hands_on_the_environment_after_export_none(tmp_path: Path) -> None:
    given = {"SLURM_EXPORT_ENV": "NONE"}
    done = bash(f"source {JOBS}/env.sh; echo ${{SLURM_EXPORT_ENV-all}}", tmp_path, **given)
    assert done.stdout.endswith("\nall\n")


def test_the_tables_are_asked_for_once_for_an_array(tmp_path: Path) -> None:
    """By the first start of the first member that gets so far."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    array = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_JOB_ID": "7"}
    array |= {"SLURM_RESTART_COUNT": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = f"source {JOBS}/env.sh; collect_later out; collect_later out"
    assert bash(script, tmp_path, **array).stdout.count("submitted") == 1


def test_an_array_is_checked_once(tmp_path: Path) -> None:
    """The first member's exit code is that of all. Members still in the queue are cancelled."""
    stub(tmp_path / "scancel", 'echo "scancel $*"')
    given = {
        "PATH": stub(tmp_path / "python", 'echo "checked"; exit $CODE'),
        "HPC_OLDSGD_OUT": "out",
    }
    given |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "0", "HPC_OLDSGD_TAUS": "1"}
    for code, says in ("2", [1, 0]), ("0", [2, 1]):  # a good member lists the algorithms besides
        given |= {"SLURM_ARRAY_JOB_ID": f"7{code}", "CODE": code}
        for count in says:
            done = bash(f"source {JOBS}/compare.slurm", tmp_path, **given)
            assert done.returncode == int(code), done.stderr
            assert done.stdout.count("checked\n") == count, done.stdout
            cancelled = f"scancel --state=PENDING 7{code}\n" in done.stdout
            assert cancelled == (code == "2" and count == 1)
            assert ("no member of the array" in done.stderr) == (code == "2")


@pytest.mark.parametrize(("name", "value"), [("TAUS", "1 x"), ("CS", "a[0]")])
def test_a_list_of_compare_that_is_none_is_one_line(name: str, value: str, tmp_path: Path) -> None:
    given = {f"HPC_OLDSGD_{name}": value, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7"}
    done = bash(f"source {JOBS}/compare.slurm", tmp_path, **given)
    assert done.returncode == 2 and f"not {value.split()[-1]}" in done.stderr


def test_compare_outside_an_array_says_so(tmp_path: Path) -> None:
    done = bash(f"source {JOBS}/compare.slurm", tmp_path)
    assert done.returncode == 2 and "this is a job array" in done.stderr
    assert "unbound" not in done.stderr


@pytest.mark.parametrize(
    ("rule", "alpha", "says"),
    [("fixed", "", ""), ("linear", "0.01", "--alpha 0.16"), ("sqrt", "0.01", "--alpha 0.04")],
)
def test_the_step_size_follows_its_rule(rule: str, alpha: str, says: str, tmp_path: Path) -> None:
    given = {"HPC_OLDSGD_ALPHA_RULE": rule, "HPC_OLDSGD_ALPHA": alpha}
    done = bash(f"source {JOBS}/env.sh >/dev/null; alpha_for 16", tmp_path, **given)
    assert done.stdout.strip() == says and done.returncode == 0


@pytest.mark.parametrize(
    ("rule", "says"), [("linear", "needs HPC_OLDSGD_ALPHA"), ("cubic", "fixed, sqrt or linear")]
)
def test_a_wrong_rule_is_one_line(rule: str, says: str, tmp_path: Path) -> None:
    done = bash(f"source {JOBS}/env.sh; alpha_for 4", tmp_path, HPC_OLDSGD_ALPHA_RULE=rule)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("train", "collect", "code"), [(0, 0, 0), (4, 2, 4), (0, 2, 2), (4, 0, 4)])
def test_a_failed_run_is_the_exit_code(train: int, collect: int, code: int, tmp_path: Path) -> None:
    """Whatever the tables make of what is left, and with the options that they were given."""
    stub = tmp_path / "python"
    stub.write_text(
        f'#!/bin/sh\ncase "$*" in *collect*) echo "$*"; exit {collect};; *) exit {train};; esac\n'
    )
    stub.chmod(0o755)
    script = f"source {JOBS}/env.sh; once out/a python x; collect out --target 0.9; exit $failed"
    done = bash(script, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == code
    assert "study collect out --target 0.9" in done.stdout


@pytest.mark.parametrize(
    ("library", "given", "expected"),
    [
        ("MPICH Device:       ch4:ucx ofi", {}, "--mpi=pmi2 ofi"),
        ("MPICH Device:       ch4:ucx ofi", {"MPIR_CVAR_CH4_NETMOD": "ucx"}, "--mpi=pmi2 ucx"),
        ("MPICH Device:       ch4:ucx", {}, "--mpi=pmi2 none"),
        ("Open MPI v5.0.11", {}, "--mpi=pmix none"),
    ],
)
def test_mpich_starts_over_libfabric_where_it_can(
    library: str, given: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """Over UCX its lines may be longer than what Slurm reads of one."""
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nprintf "a line\\n{library}\\nMPICH CC: cc\\n"\n')
    stub.chmod(0o755)
    script = f'source {JOBS}/env.sh; tasks 2; echo "${{start[1]}} ${{MPIR_CVAR_CH4_NETMOD:-none}}"'
    given = {"HPC_OLDSGD_MPI": "auto", "PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    assert bash(script, tmp_path, **given).stdout.endswith(f"{expected}\n")
