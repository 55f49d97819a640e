"""The scripts for PBS, LSF and Flux, with stand-ins for their commands, mpirun and python.

Neither Debian nor PyPI has one of the three. The stand-ins print what the manuals say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

SCHEDULERS = ("pbs", "lsf", "flux")
PYTHON = f"""
case "$*" in
  -c*) exec {sys.executable} "$@" ;;
  *helloworld*) printf 'I am process %s of 2 on a.\\n' 0 1 ;;
  *lib-version*) echo "Open MPI v5.0.11" ;;
  *--check-agents*) echo "checked $*"; exit "${{CHECK:-0}}" ;;
  *hpc_oldsgd.train*)
    echo "trained $*"; echo $$ >train.pid
    [[ -n ${{TRAIN:-}} ]] && exit "$TRAIN"
    trap "$AT_SIGNAL; exit 75" USR1
    [[ -n ${{SIGNALLED_BY_LIMIT:-}} ]] || kill -USR1 $PPID
    for _ in {{1..400}}; do sleep 0.05; done ;;
esac"""
SAVE = "mkdir -p out/checkpoints/round-5; touch out/checkpoints/round-5/manifest.json"
MPIRUN = """[[ $1 != --version ]] || { echo "mpirun (Open MPI) 5.0.11"; exit; }
[[ $1 == -n && $3 == --hostfile ]] || exit 9
started="mpirun $1 $2 $3 $4" passed=
shift 4
while [[ $1 == -x ]]; do passed+=" $2"; shift 2; done
echo "$started $*; agent $HYDRA_LAUNCHER_EXEC $PRTE_MCA_plm_ssh_agent; passed$passed"
exec "$@" """
QSTAT = """cat <<END
Job Id: 7.server
    Job_Name = train
    queue = workq
    project = _pbs_project_default
    Account_Name = mine
    Resource_List.select = 2:ncpus=1:mpiprocs=1
    Resource_List.walltime = $LIMIT
END"""
FLUX = """case "$*" in
  "getattr jobid") echo f7 ;;
  "getattr hostlist") echo a ;;
  "--parent job info f7 jobspec") cat jobspec ;;
  run*) echo "flux $*"; shift 7; exec "$@" ;;
  jobs*) echo f1 ;;
  "job kill --signal=USR1 f1") kill -USR1 "$(cat train.pid)" ;;
  "--parent batch"*) echo "flux $*, start $HPC_OLDSGD_STARTS of $HPC_OLDSGD_RUN" ;;
  *) echo "no such thing: flux $*"; exit 9 ;;
esac"""
LAUNCHED = {
    "pbs": "mpirun -n 2 --hostfile {hosts} python -m hpc_oldsgd.train {words}; "
    "agent pbs_tmrsh pbs_tmrsh",
    "lsf": "mpirun -n 2 --hostfile {hosts} python -m hpc_oldsgd.train {words}; "
    "agent blaunch blaunch",
    "flux": "flux run -n 2 -c 3 -o pmi=pmix python -m hpc_oldsgd.train {words}",
}
PUT_BACK = {
    "pbs": "qsub -N train -l select=2:ncpus=1:mpiprocs=1 -l walltime=1:00:00 -q workq -A mine "
    "-v {names} " + f"{ROOT}/jobs/pbs/train.pbs, start 1 of 7",
    "lsf": "",  # exit code 75: #BSUB -Q "75"
    "flux": "flux --parent batch -n 2 -c 3 --job-name=train -t 3600s "
    f"{ROOT}/jobs/flux/train.flux --out out --seed 1, start 1 of f7",
}


def duration(limit: str) -> int:
    hours, minutes, seconds = map(int, limit.split(":"))
    return hours * 3600 + minutes * 60 + seconds


def submit(
    name: str, folder: Path, limit: str = "1:00:00", **env: str
) -> subprocess.CompletedProcess[str]:
    """The script's whole run, as the scheduler would start it."""
    commands = {"python": PYTHON, "mpirun": MPIRUN, "qstat": QSTAT, "flux": FLUX}
    commands |= {"pbs_tmrsh": "", "blaunch": "", "bjobs": "echo $LIMIT"}
    commands["qsub"] = 'echo "qsub $*, start $HPC_OLDSGD_STARTS of $HPC_OLDSGD_RUN"'
    (folder / "bin").mkdir()
    for command, text in commands.items():
        (folder / "bin" / command).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / command).chmod(0o755)
    (folder / "hosts").write_text("a\nb\n")
    slot = {"type": "slot", "count": 1, "with": [{"type": "core", "count": 3}]}
    system = {"duration": duration(limit), "job": {"name": "train"}}
    spec = {"resources": [{"type": "node", "count": 2, "with": [slot]}]}
    (folder / "jobspec").write_text(json.dumps(spec | {"attributes": {"system": system}}))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HPC_OLDSGD"))}
    clean |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LIMIT": limit}
    clean |= {"HPC_OLDSGD_HOME": str(ROOT), "HPC_OLDSGD_VENV": ""}
    clean |= {
        "PBS_JOBID": "7.server",
        "PBS_JOBNAME": "train",
        "PBS_NODEFILE": str(folder / "hosts"),
    }
    clean |= {"PBS_O_WORKDIR": str(folder), "LSB_JOBID": "7", "LSB_JOBNAME": "train"}
    clean |= {"LSB_DJOB_HOSTFILE": str(folder / "hosts")}
    options = ["--out", "out", "--seed", "1"]
    if name != "flux":  # qsub and bsub pass no arguments on
        clean["HPC_OLDSGD_ARGS"] = " ".join(options)
        options = []
    done = subprocess.run(
        ["bash", ROOT / "jobs" / name / f"train.{name}", *options],
        cwd=folder, env=clean | env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if name == "lsf":
        done.stdout = done.stderr = (folder / "train-7.log").read_text()
    return done


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_process_checks_then_all_tasks_train(name: str, tmp_path: Path) -> None:
    done = submit(name, tmp_path, TRAIN="3", HPC_OLDSGD_DATA="/data")
    assert done.returncode == 3, (
        done.stdout + done.stderr
    )  # divergence is a result: not tried again
    words = f"--out runs/train-{'f7' if name == 'flux' else '7'} --resume auto --out out --seed 1"
    assert f"checked -m hpc_oldsgd.train {words} --check-agents 2 --check\n" in done.stdout
    assert "one world of 2 ranks" in done.stdout
    started = LAUNCHED[name].format(hosts=tmp_path / "hosts", words=words)
    assert done.stdout.count(started) == 1, done.stdout
    passed = done.stdout.partition("; passed")[2].partition("\n")[0].split()
    wanted = {"OMP_NUM_THREADS", "HPC_OLDSGD_DATA"} if name != "flux" else set()
    assert wanted <= set(passed) and "PATH" not in passed


@pytest.mark.parametrize("name", SCHEDULERS)
def test_bad_input_starts_no_task(name: str, tmp_path: Path) -> None:
    done = submit(name, tmp_path, CHECK="2")
    assert done.returncode == 2 and "checked" in done.stdout
    assert "one world" not in done.stdout and "trained" not in done.stdout


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_limit_no_longer_than_the_warning_is_refused(name: str, tmp_path: Path) -> None:
    done = submit(name, tmp_path, limit="0:02:00")
    assert done.returncode == 2 and "checked" not in done.stdout
    assert "is not longer than the 120 s of warning before it" in done.stderr


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_signalled_job_saves_and_goes_back(name: str, tmp_path: Path) -> None:
    done = submit(name, tmp_path, AT_SIGNAL=SAVE)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "goes on from its checkpoint" in done.stdout
    again = PUT_BACK[name].format(
        names="HPC_OLDSGD_ARGS,HPC_OLDSGD_HOME,HPC_OLDSGD_LAUNCHER,HPC_OLDSGD_MPI,HPC_OLDSGD_RESTARTS,"
        "HPC_OLDSGD_RETRIES,HPC_OLDSGD_RUN,HPC_OLDSGD_STARTS,HPC_OLDSGD_VENV"
    )
    assert again in done.stdout, done.stdout


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_job_is_signalled_before_its_limit(name: str, tmp_path: Path) -> None:
    """It has saved nothing, so the next start would come no further."""
    limit = {"HPC_OLDSGD_WARNING": "1", "AT_SIGNAL": ":", "SIGNALLED_BY_LIMIT": "1"}
    done = submit(name, tmp_path, limit="0:00:02", **limit)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "before it added a checkpoint: the job is not requeued" in done.stderr


@pytest.mark.parametrize("name", ["pbs", "flux"])
def test_the_number_of_starts_runs_no_command(name: str, tmp_path: Path) -> None:
    done = submit(name, tmp_path, HPC_OLDSGD_STARTS="a[$(touch sprung)]")
    assert done.returncode == 2 and "is a whole number" in done.stderr
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(("earlier", "code"), [(0, 75), (2, 75), (3, 2)])
def test_lsf_gives_up_after_so_many_restarts(earlier: int, code: int, tmp_path: Path) -> None:
    """LSF does not count them, so the script does."""
    stops = tmp_path / ".requeued-7"
    if earlier:
        stops.write_text("a stop\n" * earlier)
    done = submit("lsf", tmp_path, AT_SIGNAL=SAVE, HPC_OLDSGD_RESTARTS="3")
    assert done.returncode == code, done.stdout
    assert f", start {earlier + 1}\n" in done.stdout
    assert ("requeued 3 times: giving up" in done.stdout) == (code == 2)
    assert len(stops.read_text().splitlines()) == min(earlier + 1, 3)


def test_lsf_puts_a_stopped_job_back_by_its_exit_code() -> None:
    for path in (ROOT / "jobs" / "lsf").glob("*.lsf"):
        assert ('#BSUB -Q "75"' in path.read_text()) == (path.stem != "doctor")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_outside_a_job_a_script_says_so(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "jobs" / name / f"train.{name}"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HPC_OLDSGD_HOME": str(ROOT), "HPC_OLDSGD_VENV": ""},
    )  # fmt: skip
    assert done.returncode == 2 and "start it with" in done.stderr
