"""Write the job scripts beside an installed package: python -m hpc_oldsgd.jobs DIR

In a checkout they are in the folder jobs. The wheel has a copy. Two lines change on the way: the
scripts find env.sh in DIR, from whatever folder they are submitted, and env.sh uses this Python.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from . import cli
from .errors import UserError
from .files import replacing

PROG = "hpc_oldsgd.jobs"
FILES = Path(__file__).parent / "job_files"
ENV = '"${HPC_OLDSGD_HOME:-.}/jobs/env.sh"'
VENV = ': "${HPC_OLDSGD_VENV=$HPC_OLDSGD_HOME/.venv}"'


@dataclass(kw_only=True)
class Options:
    """Write the scripts for Slurm, PBS, LSF and Flux, the Kubernetes job and the image recipes."""

    folder: cli.Positional[Path]
    """The folder to write to; it is made if there is none."""
    force: bool = False
    """Replace files that are there. What you changed in env.sh is lost."""


def main(options: Options) -> None:
    folder = options.folder.absolute()
    found = {path.relative_to(FILES): path for path in sorted(FILES.rglob("*")) if path.is_file()}
    if not found:
        raise UserError(f"this installation has no job scripts: there is no {FILES}")
    there = [name for name in found if os.path.lexists(folder / name)]
    if there and not options.force:
        raise UserError(f"{folder / there[0]} exists: add --force to replace it")
    for name, path in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder / name) as temporary:
            temporary.write_text(adapted(path.read_text(), folder))
    print(f"{len(found)} files in {folder}: edit env.sh once, then sbatch {folder / 'train.slurm'}")


def adapted(text: str, folder: Path) -> str:
    """For this folder and this Python: a virtual environment, or whatever PATH has."""
    own = sys.prefix if sys.prefix != sys.base_prefix else ""
    text = text.replace(ENV, shlex.quote(str(folder / "env.sh")))
    return text.replace(VENV, f"HPC_OLDSGD_VENV=${{HPC_OLDSGD_VENV-{shlex.quote(own)}}}")


if __name__ == "__main__":
    cli.run(main, Options, prog=PROG)
