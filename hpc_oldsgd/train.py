"""mpirun -n 9 python -m hpc_oldsgd.train"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import cli, metrics, resume, runs
from .agent import Agent
from .checkpoint import Checkpoints
from .config import TrainOptions
from .console import Console, summary_lines
from .errors import Diverged, UserError
from .signals import Inbox
from .tasks import seed_model
from .trace import Trace, merge
from .training import Training, Worker

PROG = "hpc_oldsgd.train"


def main() -> None:
    with cli.guard(PROG):
        config, algorithm, task = runs.read_options(TrainOptions, PROG)
        signals = Inbox(config.on_signal)
        signals.install()
        run(config, algorithm, task, signals)


def run(
    config: TrainOptions, algorithm: runs.Algorithm, task: runs.Task, signals: Inbox | None = None
) -> None:
    from .transport.mpi import Startup, world
    from .transport.mpi_requests import gather_text

    comm = world()
    n, rank = comm.size, comm.rank
    check_world(n)
    console = Console(shown=rank == 0, prog=PROG)
    # Whatever one rank finds wrong, all ranks end with, so that nobody waits for it.
    startup = Startup(comm)
    device = startup.check(lambda: choose_device(config.device))
    set_threads(config.threads, startup.ranks_here)
    topology = startup.check(lambda: runs.make_topology(config, n))
    seed_model(config.seed)
    model = startup.check(lambda: task.model().to(device))
    who = resume.identity("train", config, algorithm, task, topology, model)

    def shards_here(found: resume.Checkpoint) -> list[int]:
        if config.resume_average:
            return list(range(found.count)) if rank == 0 else []
        return [rank]

    startup.check(lambda: resume.source(config))
    plan, overwrite = resume.plan(
        config, who, n, shards_here, lambda text: gather_text(comm, text), console.say
    )
    startup.check(lambda: resume.take_mean(plan, model) if rank == 0 else None)
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
    try:  # last, so that a wrong option costs no run that is to be replaced
        history = startup.check(lambda: plan.prepare(overwrite) if rank == 0 else [])
    except UserError:  # on all ranks alike
        agent.finish()
        raise
    with alone(comm):
        iterations = config.iterations or task.default_iterations
        title = (
            f"{algorithm.name}, {topology.name}, n = {n}, tau = {algorithm.tau}, "
            f"alpha = {alpha:g}, {task.name}, {config.partition}"
        )
        folder = None
        if rank == 0:
            folder = metrics.RunFolder(plan.path, config.tensorboard, history)
            runs.write_config(
                folder, config, algorithm, task, agents=n, alpha=alpha, iterations=iterations,
                topology=runs.describe_topology(topology),
                transport={"progress": agent.transport.progress, "native": agent.transport.native},
            )  # fmt: skip
            print(f"{PROG}: {title}; {agent.flat.d:,} parameters on {device.type}", flush=True)
        console.start(iterations)
        training = Training(
            config, task, agent, [Worker(rank, model, optimizer, shard)], iterations,
            on_row=runs.on_row(console, folder), on_step=console.step, say=console.say,
            signals=signals,
        )  # fmt: skip
        training.rows += history
        training.checkpoints = Checkpoints(
            plan.path, agent.transport, training.control, runs.policy(config), shard=rank, count=n,
            about=runs.about(who, config, alpha, model, agent.flat),
            before_commit=folder.sync if folder is not None else lambda: None,
        )  # fmt: skip
        resume.load(training, plan, rank, alpha, console.say)
        ended = None
        try:
            training.run()
        except Diverged as error:  # on every rank alike
            ended = error
        training.control.close()
        agent.finish()
        console.close()
        if trace is not None:
            trace.align(startup.clock_offset())
            write_trace(trace, plan.path, comm)
        if folder is not None:
            if ended is None and not training.stopped:
                summary = runs.summarise(training.rows, task, title, "s")
                console.warn(folder.summary(summary))
                print(summary_lines(summary, plan.path), flush=True)
            folder.close()
    runs.check_end(training, ended, plan.path)


def check_world(n: int) -> None:
    expected = cli.launcher_size()
    if n == 1 and expected > 1:
        raise UserError(
            f"the launcher started {expected} processes but MPI sees a world of 1: mpirun and "
            "mpi4py belong to different MPIs, or srun needs --mpi=pmi2 or --mpi=pmix"
        )


@contextlib.contextmanager
def alone(comm: Any) -> Iterator[None]:
    """An error that one rank meets by itself ends the job: nobody waits for it in MPI_Finalize."""
    from .transport.mpi_requests import end_job

    try:
        yield
    except BaseException as error:
        if comm.size == 1:
            raise
        code, shown = getattr(error, "exit_code", None), ""
        if code is not None:
            shown = f"{PROG}: rank {comm.rank}: {' '.join(str(error).split())}\n"
        elif not isinstance(error, KeyboardInterrupt):
            shown = f"{PROG}: rank {comm.rank} failed, the job ends:\n{traceback.format_exc()}"
        end_job(comm, shown, code or (130 if isinstance(error, KeyboardInterrupt) else 1))


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
    main()
