"""Rank and size as mpirun or srun set them, known before MPI starts; a check that MPI agrees."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import UserError

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE")


def launcher_rank() -> int:
    """This process's rank as mpirun or srun set it, before MPI is initialised; 0 without them."""
    # A batch script sees SLURM_PROCID too; only inside a step of srun does it mean a rank.
    return _from_environment(_RANK, "SLURM_PROCID", default=0)


def launcher_size() -> int:
    """The number of processes that mpirun or srun started; 1 without them."""
    return _from_environment(_SIZE, "SLURM_STEP_NUM_TASKS", default=1)


def command_of_run(n: int, options: str) -> str:
    """What starts a run of n ranks from here, by the scheduler whose job this is."""
    if "SLURM_JOB_ID" in os.environ:
        return f"sbatch --ntasks={n} jobs/train.slurm {options}"
    if "PBS_JOBID" in os.environ:
        select = f"-l select={n}:ncpus=1:mpiprocs=1"
        return f'qsub {select} -v HPC_OLDSGD_ARGS="{options}" jobs/pbs/train.pbs'
    if "LSB_JOBID" in os.environ:
        return f'HPC_OLDSGD_ARGS="{options}" bsub -n {n} <jobs/lsf/train.lsf'
    if "FLUX_JOB_ID" in os.environ:
        return f"flux batch -n {n} jobs/flux/train.flux {options}"
    return f"mpirun -n {n} python -m hpc_oldsgd.train {options}"


def check_world(n: int) -> None:
    """`n` is the size that MPI sees: with two MPIs mixed, each rank would train alone, silently."""
    expected = launcher_size()
    if n == 1 and expected > 1:
        raise UserError(
            f"the launcher started {expected} processes but MPI sees a world of 1: mpirun and "
            "mpi4py belong to different MPIs, or srun needs --mpi=pmi2 or --mpi=pmix"
        )


def _from_environment(names: Sequence[str], slurm: str, default: int) -> int:
    if "SLURM_STEP_ID" in os.environ:
        names = [*names, slurm]
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return default
