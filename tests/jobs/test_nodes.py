"""mpirun over two nodes, which are namespaces of this machine with cards of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import PYTHONPATH, ROOT
from support.jobs import OPENMPI, openmpi_settings

pytestmark = pytest.mark.root
NODES = ROOT / "tests" / "jobs" / "nodes.sh"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def why_not() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name, path=PATH)]
    if missing:
        return f"no {', '.join(missing)}: make test-deps installs them"
    probe = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "up"]
    if subprocess.run(
        [*probe, "type", "bridge"], capture_output=True, env={"PATH": PATH}
    ).returncode:
        return "this machine allows no namespaces or no bridge"
    return ""


if reason := why_not():
    pytestmark = [pytest.mark.root, pytest.mark.skip(reason=reason)]


def on_two_nodes(*words: str | Path, **env: str) -> str:
    done = subprocess.run(
        ["timeout", "150", NODES, "2", *map(str, words)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_doctor_finds_the_card_that_open_mpi_was_given(tmp_path: Path) -> None:
    settings = openmpi_settings()
    settings.pop("PRTE_MCA_rmaps_default_mapping_policy")  # it would put all ranks on one node
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    printed = on_two_nodes(
        OPENMPI / "bin" / "mpirun", "--hostfile", tmp_path / "hosts", "-n", "2",
        "--map-by", "ppr:1:node", "--mca", "btl_tcp_if_include", "eth1",
        "-x", "MPI4PY_LIBMPI", "-x", "PYTHONPATH", sys.executable, "-m", "hpc_oldsgd.doctor",
        "--model-bytes", "100000", "--grad-seconds", "0.01", **settings,
    )  # fmt: skip
    assert "2 ranks on 2 hosts" in printed
    assert "between hosts (1 edge) the bytes take eth1\n" in printed, printed


def test_the_pbs_script_trains_on_two_nodes(tmp_path: Path) -> None:
    """By a real mpirun. Stand-ins are PBS's qstat, and its pbs_tmrsh in the place of ssh."""
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    (tmp_path / "qstat").write_text("#!/bin/sh\necho Resource_List.walltime = 01:00:00\n")
    (tmp_path / "pbs_tmrsh").write_text('#!/bin/sh\nexec on_node "$@"\n')
    for name in ("qstat", "pbs_tmrsh"):
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out"
    printed = on_two_nodes(
        "bash", ROOT / "jobs" / "pbs" / "train.pbs",
        PATH=f"{tmp_path}:{os.environ['PATH']}", PBS_JOBID="7.server", PBS_O_WORKDIR=str(tmp_path),
        PBS_NODEFILE=str(tmp_path / "hosts"), HPC_OLDSGD_HOME=str(ROOT), HPC_OLDSGD_VENV=sys.prefix,
        HPC_OLDSGD_ARGS=f"--task logistic --iterations 20 --out {out}",
    )  # fmt: skip
    assert "one world of 2 ranks by mpirun -n 2 --hostfile" in printed
    assert "ring, n = 2, " in printed and (out / "summary.json").exists()
