"""Nothing is unpickled but known data, nothing removed through a link, no shell string built."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runs import folder
from hpc_oldsgd.runtime import part_file
from hpc_oldsgd.runtime.part_file import Unusable
from support import ROOT

SOURCES = [
    path
    for folder in ("hpc_oldsgd", "benchmarks", "examples", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "setup.py"]
# The one place: bytes whose published MD5 has just been found right.
MAY_UNPICKLE = {"hpc_oldsgd/data/cifar.py"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput")}
SHELLS |= {("subprocess", "getstatusoutput"), ("torch", "load"), ("torch", "save")}
# mpi4py's lower-case calls send pickles; its upper-case ones send memory.
OBJECTS = {"send", "recv", "isend", "irecv", "ssend", "bsend", "sendrecv", "bcast", "gather"}
OBJECTS |= {"allgather", "scatter", "alltoall", "reduce", "allreduce", "scan", "exscan", "issend"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(ROOT)), node


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def complaints(where: str, node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names]
        if where not in MAY_UNPICKLE and PICKLES.intersection(m.partition(".")[0] for m in modules):
            yield "imports a module that unpickles"
    if not isinstance(node, ast.Call):
        return
    function = node.func
    if isinstance(function, ast.Name) and function.id in RUNS_TEXT:
        yield f"calls {function.id}"
    if any(k.arg == "shell" and not _false(k.value) for k in node.keywords):
        yield "starts a shell"
    if isinstance(function, ast.Attribute):
        owner = name_of(function.value)
        if (owner, function.attr) in SHELLS:
            yield f"calls {owner}.{function.attr}"
        if (owner, function.attr) in {("np", "load"), ("numpy", "load")} and not any(
            k.arg == "allow_pickle" and _false(k.value) for k in node.keywords
        ):
            yield "calls np.load without allow_pickle=False"
        if function.attr in OBJECTS and owner.lower().strip("_").endswith(("comm", "world")):
            yield f"sends pickles by {owner}.{function.attr}"


def _false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_source_has_none_of_it() -> None:
    found = [
        f"{where}:{getattr(node, 'lineno', 0)} {text}"
        for where, node in nodes()
        for text in complaints(where, node)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from torch import x; torch.load(f)", "np.load(f)", "eval(text)",
        "np.load(f, allow_pickle=True)", "comm.bcast(x)", "self.comm.allgather(x)", "os.system(c)",
        "subprocess.run(c, shell=True)", "from joblib import load", "MPI.COMM_WORLD.recv()",
    ],
)  # fmt: skip
def test_the_test_would_notice(line: str) -> None:
    assert any(t for node in ast.walk(ast.parse(line)) for t in complaints("x.py", node))


class Trap:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.place),)


def test_a_checkpoint_is_never_unpickled(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    (tmp_path / "shard").write_bytes(trap)
    with pytest.raises(Unusable):
        part_file.read(tmp_path / "shard")
    torch.save({"x": Trap(tmp_path / "sprung")}, tmp_path / "shard")
    with pytest.raises(Unusable):
        part_file.read(tmp_path / "shard")
    (tmp_path / "manifest.json").write_bytes(trap)
    with pytest.raises(Unusable):
        store.find(tmp_path)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()  # the trap does work


def run_folder(path: Path) -> Path:
    for k in (1, 2, 3):
        checkpoint = path / "checkpoints" / f"round-0000000{k}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    (path / "config.json").write_text("{}")
    return path


def everything(path: Path) -> list[str]:
    return sorted(str(p) for p in path.rglob("*"))


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    """Of a run, of its checkpoints, of one checkpoint, of a file in it."""
    precious = run_folder(tmp_path / "precious")
    before = everything(precious)
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(UserError, match="is a link, and nothing is removed through one"):
        folder.prepare(tmp_path / "link", overwrite=True)

    run = run_folder(tmp_path / "run")
    (run / "checkpoints" / "round-00000000").symlink_to(precious / "checkpoints")
    (run / "checkpoints" / "round-00000009").symlink_to(precious)
    (run / "checkpoints" / "round-00000001" / "rank-00000.safetensors").symlink_to(
        precious / "config.json"
    )
    (run / "checkpoints" / "round-00000001" / "deep").symlink_to(precious)
    store.prune(run, 1)
    store.remove_newer(run, 3)
    assert [p.name for p in store.newest_first(run)] == ["round-00000003"]
    (run / "tensorboard").symlink_to(precious)
    (run / "checkpoints" / "round-00000003" / "deep").symlink_to(precious)
    folder.prepare(run, overwrite=True)
    assert everything(run) == [str(run / ".lock")]
    assert everything(precious) == before


HOSTILE = ["; touch sprung", "$(touch sprung)", "`touch sprung`", "a b", "'", '"; touch sprung; "']


def test_jobs_pass_words_on_as_they_are(tmp_path: Path) -> None:
    """compare.slurm with a python that only notes its arguments, and hostile names everywhere."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && shift 3 && echo "$@" && exit\n'
        'printf "%s\\n" "$@" >> "$NOTES"\necho "--" >> "$NOTES"\n'
    )
    python.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes"),
        "HPC_OLDSGD_HOME": str(ROOT), "HPC_OLDSGD_VENV": "", "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_TASK_MIN": "5", "SLURM_JOB_PARTITION": "p",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": "0",
        "HPC_OLDSGD_OUT": "out; touch sprung", "HPC_OLDSGD_ALGORITHMS": "$(touch${IFS}sprung)",
        "HPC_OLDSGD_TAUS": "1 2", "HPC_OLDSGD_CS": "5",
    }  # fmt: skip

    def compare(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", ROOT / "jobs" / "compare.slurm", *HOSTILE],
            cwd=tmp_path, env=environment | more, capture_output=True, text=True,
        )  # fmt: skip

    for hostile in ({"HPC_OLDSGD_TAUS": "1;touch${IFS}sprung"}, {"HPC_OLDSGD_CS": "`touch`"}):
        refused = compare(**hostile)
        assert refused.returncode == 2 and "numbers, not" in refused.stderr
    assert not (tmp_path / "notes").exists()
    ran = compare()
    assert ran.returncode == 0, ran.stderr
    words = (tmp_path / "notes").read_text().split("\n")
    assert words[:4] == ["-m", "hpc_oldsgd.simulate", "--algorithm", "$(touch${IFS}sprung)"]
    assert words[4:8] == ["--tau", "1", "--c", "5"]
    assert words[8:14] == HOSTILE
    assert words[14] == "--out" and words[15].startswith("out; touch sprung/$(touch")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["HPC_OLDSGD_RESTARTS", "HPC_OLDSGD_LAUNCHER"])
def test_jobs_refuse_what_is_no_number_or_launcher(tmp_path: Path, name: str) -> None:
    """bash runs what stands inside an arithmetic value, so such a value is looked at first."""
    environment = {
        "PATH": os.environ["PATH"], "HPC_OLDSGD_VENV": "", "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_RESTART_COUNT": "1", name: "a[$(touch sprung)]",
    }  # fmt: skip
    script = f"source {ROOT}/jobs/env.sh; tasks 1; requeue"
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 2 and name in ran.stderr
    assert not (tmp_path / "sprung").exists()
