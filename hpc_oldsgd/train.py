"""mpirun -n 9 python -m hpc_oldsgd.train"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import cli
from .checkpoints.store import Gather
from .checkpoints.writer import Checkpoints
from .cli.console import Console, summary_lines
from .errors import Diverged, NeighbourTimeout, Stopped, UserError
from .launch.device import choose_device, set_threads, unseen_gpu
from .launch.launcher import check_world
from .runs import folder as run_folder
from .runs import resume, session
from .runs.recovery import Recovery
from .runtime.agent import Agent
from .simulation.slowdown import Drag
from .tasks import seed_model
from .training import tau_auto, tau_measure
from .training.loop import Training, Worker
from .training.options import TrainOptions
from .training.signals import Inbox
from .transport.heartbeat import Board, clear
from .transport.trace import Trace, merge

PROG = "hpc_oldsgd.train"


def main() -> None:
    try:
        with cli.guard(PROG):
            config, algorithm, task = session.read_options(TrainOptions, PROG)
            signals = Inbox(config.on_signal)
            signals.install()
            run(config, algorithm, task, signals)
    except SystemExit as ended:
        leave_if_shrunk(int(ended.code or 0))
        raise
    leave_if_shrunk(0)


def leave_if_shrunk(code: int) -> None:
    """After the death of a rank MPI cannot be finalized."""
    ulfm = sys.modules.get("hpc_oldsgd.transport.mpi.ulfm")
    if ulfm is not None and ulfm.survivors:
        with alone(ulfm.MPI.COMM_WORLD, NeighbourTimeout):
            ulfm.leave(code)


def run(
    config: TrainOptions,
    algorithm: session.Algorithm,
    task: session.Task,
    signals: Inbox | None = None,
) -> None:
    from .transport.mpi import world

    with alone(world(), NeighbourTimeout):
        _run(world(), config, algorithm, task, signals)


def _run(
    comm: Any, config: TrainOptions, algorithm: session.Algorithm, task: session.Task,
    signals: Inbox | None,
) -> None:  # fmt: skip
    from .transport.mpi import Startup
    from .transport.mpi.ulfm import meet, require_ulfm

    n, rank = comm.size, comm.rank
    check_world(n)
    console = Console(shown=rank == 0, prog=PROG)
    # Whatever one rank finds wrong, all ranks end with, so that nobody waits for it.
    startup = Startup(comm, config.timeout or None)
    if config.on_failure == "shrink":
        startup.check(require_ulfm)
    device = startup.check(lambda: choose_device(config.device))
    if config.device == "auto" and (unseen := unseen_gpu(device)):
        console.say(unseen)
    set_threads(config.threads, startup.sharing)
    topology = startup.check(lambda: session.make_topology(config, n))
    startup.check(lambda: session.check_late(config, algorithm, topology))
    if config.auto_tau:
        startup.check(lambda: check_auto(config, algorithm, topology))
    drag = startup.check(lambda: Drag(config.slow, config.jitter, config.seed, n, rank))
    seed_model(config.seed)
    model = startup.check(lambda: session.make_model(task, device))
    who = startup.check(lambda: resume.identity("train", config, algorithm, task, topology, model))

    def shards_here(found: resume.Checkpoint) -> list[int]:
        if config.resume_average:
            return list(range(found.count)) if rank == 0 else []
        return [rank]

    startup.check(lambda: resume.claim(config) if rank == 0 else None)
    plan, overwrite = resume.plan(config, who, n, shards_here, startup.gather, console.say)
    if plan.goes_on is not None and config.auto_tau:
        algorithm = dataclasses.replace(algorithm, tau=plan.goes_on.manifest["tau"])
    startup.check(lambda: resume.take_mean(plan, model) if rank == 0 else None)
    state = startup.check(lambda: resume.read(plan, rank, model))
    agents, data_of = plan.data(n)
    shard = startup.check(lambda: task.shard(agents[rank], data_of, config.partition, config.seed))
    size = config.eval_samples
    startup.check(lambda: [task.train_sample(size), task.test_set(size)])  # kept for the rows
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
            late=config.late_policy(),
            trace=trace,
        )
    )
    try:  # last, so that a wrong option costs no run that is to be replaced
        history = startup.check(lambda: plan.prepare(overwrite) if rank == 0 else [])
    except UserError:  # on all ranks alike
        agent.finish()
        raise
    if agent.transport.progress == "poll":
        drag.poll = agent.transport.poll
    if config.timeout:
        agent.transport.board = Board(plan.path, rank, n, agent.transport.status, config.timeout)
    with alone(comm, survived=config.on_failure == "shrink"):
        iterations = config.iterations or task.default_iterations
        training = Training(
            config, task, agent, [Worker(rank, model, optimizer, shard)], iterations,
            on_step=console.step, say=console.say, signals=signals, drag=drag,
        )  # fmt: skip
        if config.auto_tau:
            bounds = tau_auto.Bounds.parse(config.auto_tau)
            if plan.goes_on is None:
                console.say(tau_measure.calibrate(training, bounds).reason)
            if config.retune:
                tau_measure.Retuner(training, bounds, config.retune)
            algorithm = agent.algorithm
        title = (
            f"{algorithm.name}, {topology.name}, n = {n}, tau = {algorithm.tau}, "
            f"alpha = {alpha:g}, {task.name}, {config.partition}"
        )
        folder = None
        if rank == 0:
            folder = run_folder.RunFolder(plan.path, config.tensorboard, history)
            session.write_config(
                folder, config, algorithm, task, agents=n, alpha=alpha, iterations=iterations,
                topology=session.describe_topology(topology),
                transport={"progress": agent.transport.progress, "native": agent.transport.native},
            )  # fmt: skip
            print(f"{PROG}: {title}; {agent.flat.d:,} parameters on {device.type}", flush=True)
        console.start(iterations)
        training.on_row = session.on_row(console, folder)
        training.rows += history
        training.data_of = data_of
        lost = plan.goes_on.manifest.get("lost", []) if plan.goes_on is not None else []
        training.checkpoints = Checkpoints(
            plan.path, agent.transport, training.control, session.policy(config), shard=rank,
            count=n,
            about={
                **session.about(who, config, alpha, model, agent.flat),
                "data": {"of": data_of, "agents": agents},
                "lost": lost,
            },
            before_commit=folder.sync if folder is not None else lambda: None,
        )  # fmt: skip
        resume.load(training, plan, state, alpha, console.say)
        del state  # a model and more

        ended, recovery = None, Recovery(config, task, agent, training, console, folder, lost)
        try:
            recovery.run()
        except Diverged as error:  # on every rank alike
            ended = error
        recovery.finish()
        folder = recovery.folder
        if agent.transport.board is not None:
            agent.transport.board.close()
        console.close()
        if trace is not None:
            trace.align(startup.clock_offset())
            console.warn(write_trace(trace, plan.path, startup.gather))
        if folder is not None:
            if ended is None and not training.stopped:
                summary = session.summarise(training.rows, task, title, "s")
                summary["lost"] = recovery.describe()
                console.warn(folder.summary(summary))
                print(summary_lines(summary, plan.path), flush=True)
            folder.close()
            clear(plan.path)  # nobody waits any more
    if config.on_failure == "shrink":
        meet(comm, config.timeout or None)
    else:
        startup.gather("")  # MPI_Finalize would wait for a stopped rank for ever
    try:
        session.check_end(training, ended, plan.path)
    except (Diverged, Stopped) as error:
        error.local = bool(recovery.lost) and agent.rank == 0  # the launcher's rank 0 may be dead
        raise


def check_auto(
    config: TrainOptions, algorithm: session.Algorithm, topology: session.Topology
) -> None:
    if config.progress == "none":
        raise UserError("--tau auto needs messages that move during the gradients: --progress auto")
    tau_auto.check(algorithm, topology)


@contextlib.contextmanager
def alone(
    comm: Any, errors: type[BaseException] = BaseException, survived: bool = False
) -> Iterator[None]:
    """An error that one rank meets by itself ends the job: nobody waits for it in MPI_Finalize.

    Where the others can survive it, an unforeseen one ends this rank only.
    """
    from .transport.mpi.job import AFTER_RANK_0_S, end_job, end_rank

    try:
        yield
    except errors as error:
        if comm.size == 1:
            raise
        code, shown = getattr(error, "exit_code", None), ""
        all_may_have_it = not isinstance(error, (NeighbourTimeout, KeyboardInterrupt))
        if comm.rank and all_may_have_it and not survived:
            time.sleep(AFTER_RANK_0_S)  # which then ends the job, and one has spoken for all
        if isinstance(error, NeighbourTimeout):
            shown = "".join(f"{PROG}: {text}\n" for text in (str(error), error.everybody) if text)
        elif code is not None:
            shown = f"{PROG}: rank {comm.rank}: {' '.join(str(error).split())}\n"
        elif survived and isinstance(error, Exception):
            end_rank(
                f"{PROG}: rank {comm.rank} failed, the others go on:\n{traceback.format_exc()}"
            )
        elif not isinstance(error, KeyboardInterrupt):
            shown = f"{PROG}: rank {comm.rank} failed, the job ends:\n{traceback.format_exc()}"
        end_job(comm, shown, code or (130 if isinstance(error, KeyboardInterrupt) else 1))


def write_trace(trace: Trace, path: Path, gather: Gather) -> str:
    """One file of all ranks; on rank 0 the problem if there is one, say a full disk."""
    problem = ""
    with contextlib.suppress(OSError):  # rank 0 then misses it
        trace.write(path / f".trace.{trace.rank}.json")
    n = len(gather("written"))
    if trace.rank == 0:
        parts = [path / f".trace.{j}.json" for j in range(n)]
        try:
            merge(parts, path / "trace.json")
        except (OSError, ValueError) as error:  # a part that is cut short is not JSON
            why = getattr(error, "strerror", None) or "a rank has not written its part"
            problem = f"trace.json: {why}"
        for file in parts:
            file.unlink(missing_ok=True)
    return problem


if __name__ == "__main__":
    main()
