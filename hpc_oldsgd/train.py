"""mpirun -n 9 python -m hpc_oldsgd.train"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from . import cli, metrics, runs
from .agent import Agent
from .config import TrainOptions
from .console import Console, summary_lines
from .errors import UserError
from .tasks import seed_model
from .trace import Trace, merge
from .training import Training, Worker

PROG = "hpc_oldsgd.train"


def main() -> None:
    with cli.guard(PROG):
        config, algorithm, task = runs.read_options(TrainOptions, PROG)
        run(config, algorithm, task)


def run(config: TrainOptions, algorithm: runs.Algorithm, task: runs.Task) -> None:
    from .transport.mpi import Startup, world

    comm = world()
    n, rank = comm.size, comm.rank
    expected = cli.launcher_size()
    if n == 1 and expected > 1:
        raise UserError(
            f"the launcher started {expected} processes but MPI sees a world of 1: mpirun and "
            "mpi4py belong to different MPIs, or srun needs --mpi=pmi2 or --mpi=pmix"
        )
    # Whatever one rank finds wrong, all ranks end with, so that nobody waits for it.
    startup = Startup(comm)
    device = startup.check(lambda: choose_device(config.device))
    set_threads(config.threads, startup.ranks_here)
    topology = startup.check(lambda: runs.make_topology(config, n))
    path = Path(startup.same_text(str(runs.folder_for(config, n))))
    startup.check(lambda: metrics.prepare(path, config.overwrite) if rank == 0 else None)
    seed_model(config.seed)
    model = startup.check(lambda: task.model().to(device))
    shard = startup.check(lambda: task.shard(rank, n, config.partition, config.seed))
    alpha = config.alpha or task.default_alpha
    optimizer = config.make_optimizer(model, alpha)
    trace = Trace(rank) if config.trace else None
    if trace is not None:
        trace.align(startup.clock_offset())
    agent = startup.check(
        lambda: Agent(
            model,
            optimizer,
            algorithm,
            topology,
            comm,
            buffers=config.buffers,
            wire=config.wire_dtype(next(model.parameters()).dtype),
            progress=config.progress,
            staging=config.staging,
            timeout_s=config.timeout or None,
            trace=trace,
        )
    )
    title = (
        f"{algorithm.name}, {topology.name}, n = {n}, tau = {algorithm.tau}, "
        f"alpha = {alpha:g}, {task.name}, {config.partition}"
    )
    iterations = config.iterations or task.default_iterations
    console = Console(iterations, shown=rank == 0)
    folder = None
    if rank == 0:
        folder = metrics.RunFolder(path, config.tensorboard)
        runs.write_config(
            folder, config, algorithm, task, agents=n, alpha=alpha, iterations=iterations,
            topology=runs.describe_topology(topology),
            transport={"progress": agent.transport.progress, "native": agent.transport.native},
        )  # fmt: skip
        print(f"{PROG}: {title}; {agent.flat.d:,} parameters on {device.type}", flush=True)

    def on_row(row: dict[str, object]) -> None:
        console.row(row)
        if folder is not None:
            folder.row(row)

    training = Training(
        config, task, agent, [Worker(rank, model, optimizer, shard)], iterations,
        on_row=on_row, on_step=console.step,
    )  # fmt: skip
    rows = training.run()
    training.control.close()
    agent.finish()
    console.close()
    if trace is not None:
        trace.align(startup.clock_offset())
        write_trace(trace, path, comm)
    if folder is not None:
        summary = runs.summarise(rows, task, title, "s")
        folder.write("summary.json", summary)
        folder.close()
        print(summary_lines(summary, path), flush=True)


def choose_device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    # With one GPU bound to each task it is device 0; where a rank sees all, it takes its own.
    local = next(
        (os.environ[k] for k in ("SLURM_LOCALID", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
         if k in os.environ), "0",
    )  # fmt: skip
    device = torch.device("cuda", int(local) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def set_threads(threads: int, ranks_here: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(threads or max(1, (cores or 1) // ranks_here))


def write_trace(trace: Trace, path: Path, comm: object) -> None:
    part = path / f".trace.{trace.rank}.json"
    trace.write(part)
    comm.Barrier()  # type: ignore[attr-defined]
    if trace.rank == 0:
        parts = [path / f".trace.{j}.json" for j in range(comm.size)]  # type: ignore[attr-defined]
        merge(parts, path / "trace.json")
        for file in parts:
            file.unlink()


if __name__ == "__main__":
    sys.exit(main())
