"""python -m hpc_oldsgd.jobs DIR, with the files that a wheel has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpc_oldsgd import jobs
from hpc_oldsgd.errors import UserError
from support import ROOT
from support.wheels import built


def files(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in found}


@pytest.fixture(scope="module")
def from_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job files of a wheel, built from a tree with the link and without the package's code."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "jobs", tree / "jobs")
    (tree / "hpc_oldsgd").mkdir()
    (tree / "hpc_oldsgd" / "__init__.py").touch()
    shutil.copy(ROOT / "hpc_oldsgd" / "job_files", tree / "hpc_oldsgd", follow_symlinks=False)
    zipfile.ZipFile(built(tree)).extractall(tree / "site")
    return tree / "site" / "hpc_oldsgd" / "job_files"


def test_a_wheel_has_every_job_file(from_wheel: Path) -> None:
    assert files(from_wheel) == files(ROOT / "jobs")


def test_the_scripts_work_from_any_folder(
    from_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FILES", from_wheel)
    folder = tmp_path / "my 'own' $jobs"
    jobs.main(jobs.Options(folder=folder))
    assert files(folder).keys() == files(from_wheel).keys()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HPC_OLDSGD"))}
    for path in [
        *folder.glob("*.slurm"),
        folder / "pbs" / "train.pbs",
        folder / "lsf" / "train.lsf",
    ]:
        done = subprocess.run(["bash", path], cwd="/", env=env, capture_output=True, text=True)
        assert done.returncode == 2 and "start it with" in done.stderr, (path, done.stderr)
    show = f"source {jobs.shlex.quote(str(folder / 'env.sh'))}; command -v python"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash", "-c", show], env=env | slurm, capture_output=True, text=True)
    assert done.stdout.endswith(f"\n{sys.prefix}/bin/python\n"), done.stdout + done.stderr


def test_nothing_is_replaced_unless_told(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("mine")
    with pytest.raises(UserError, match=r"env\.sh exists: add --force to replace it"):
        jobs.main(jobs.Options(folder=tmp_path))
    assert files(tmp_path) == {"env.sh": "mine"}
    jobs.main(jobs.Options(folder=tmp_path, force=True))
    assert "mine" not in files(tmp_path)["env.sh"]
    assert os.access(tmp_path / "env.sh", os.R_OK)
