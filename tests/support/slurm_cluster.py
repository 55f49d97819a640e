"""The throwaway cluster of cluster.sh, as the tests use it: submit, wait, read the log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import ROOT

LIMIT_S = 400.0  # for one job; generous, since machines are noisy
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")


def why_not() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons and the namespaces need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [
        name
        for name in ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
        if not shutil.which(name, path=path)
    ]
    if missing:
        return f"no {', '.join(missing)}: make test-deps installs them"
    namespaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(namespaces, capture_output=True).returncode:
        return "this machine allows no namespaces"
    return ""


class Cluster:
    """Two nodes of 32 pretended cores and 4 pretended GPUs; everything ends with `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._host = subprocess.Popen(
            [ROOT / "tests" / "slurm" / "cluster.sh", "sh", "-c", "echo ready; exec cat"],
            env={**os.environ, "CLUSTER_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._host.stdout is not None
        if self._host.stdout.readline() != "ready\n":
            raise RuntimeError("the cluster did not start: its messages are above")
        # cluster.sh -> unshare -> process 1 of the cluster's namespaces
        self._inside = _child(_child(self._host.pid))

    def stop(self) -> None:
        assert self._host.stdin is not None
        self._host.stdin.close()
        self._host.wait(120)

    def command(self, *words: str | Path, cwd: Path = ROOT, **env: str) -> str:
        """What a command on the head node prints."""
        enter = ["nsenter", f"--target={self._inside}", "-n", "-u", "-m", "-p", f"--wd={cwd}"]
        done = subprocess.run(
            [*enter, *map(str, words)],
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return done.stdout

    def sbatch(self, cwd: Path, *words: str | Path, **env: str) -> Job:
        settings = {
            "HPC_OLDSGD_HOME": str(ROOT),
            "HPC_OLDSGD_VENV": sys.prefix,
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }
        printed = self.command("sbatch", "--parsable", *words, cwd=cwd, **{**settings, **env})
        return Job(self, printed.strip(), cwd)


class Job:
    def __init__(self, cluster: Cluster, number: str, cwd: Path) -> None:
        self.cluster, self.number, self.cwd = cluster, number, cwd

    @property
    def log(self) -> str:
        """All it has printed, over all its starts and array tasks."""
        return "".join(p.read_text() for p in sorted(self.cwd.glob(f"*-{self.number}*.log")))

    def states(self) -> list[str]:
        """Of the job, or of each task of an array."""
        return self.cluster.command(
            "squeue", "--all", "--noheader", "--states=all", "--format=%T", f"--jobs={self.number}"
        ).split()

    def ended(self) -> bool:
        return set(self.states()) <= set(ENDED)

    def until(self, what: str, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        limit = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > limit or (what != "end" and self.ended()):
                states = self.states()
                self.cluster.command("scancel", self.number)  # it would slow down what follows
                raise AssertionError(f"job {self.number}: no {what}\n{states}\n{self.log}")
            time.sleep(0.1)

    def wait(self, expected: str = "COMPLETED", limit_s: float = LIMIT_S) -> str:
        """Its log, when it has come to the expected end."""
        self.until("end", self.ended, limit_s)
        assert set(self.states()) == {expected}, f"{self.states()}\n{self.log}"
        return self.log


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
