"""One agent in each MPI rank; importing this starts MPI."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ..algorithms import Algorithm
from ..checkpoints.store import Checkpoint, Gather
from ..data import Shard
from ..errors import NeighbourTimeout
from ..launch.device import choose_device, set_threads, unseen_gpu
from ..launch.launcher import check_world
from ..runtime.agent_runner import AgentRunner
from ..simulation.slowdown import Slowdown, slowdowns
from ..simulation.swarm import Swarm
from ..topology import Topology
from ..training.loop import backward
from ..training.measure import make_plan
from ..training.options import TrainOptions
from ..training.plan import Allowed, Bounds, Plan
from ..training.retune import Retuner
from ..transport.mpi import Startup, ulfm, world
from ..transport.mpi.job import AFTER_RANK_0_S, end_job, end_rank, explained_by_death
from ..transport.trace import Trace, merge
from .backend import Backend, Graphs, Models, Optimizers
from .recovery import Recovery
from .spec import Spec, check_train

if TYPE_CHECKING:
    from .session import Session

T = TypeVar("T")


class Mpi(Backend):
    kind, time_unit = "train", "s"

    def __init__(self, options: TrainOptions, prog: str, say: Callable[[str], None]) -> None:
        self.options, self.prog, self.say = options, prog, say
        self.comm = world()
        self.n, self.here = self.comm.size, [self.comm.rank]
        self.part, self.parts = self.comm.rank, self.n
        check_world(self.n)
        self.startup = Startup(self.comm, options.timeout or None)
        self.trace = Trace(self.comm.rank) if options.trace else None
        self.recovery: Recovery | None = None

    def check(self, step: Callable[[], T]) -> T:
        return self.startup.check(step)

    def gather(self, text: str) -> list[str]:
        return self.startup.gather(text)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return alone(self.comm, self.prog, survived=self.options.on_failure == "shrink")

    def prepare(self, algorithm: Algorithm, graphs: Graphs) -> None:
        options = self.options
        if options.on_failure == "shrink":
            ulfm.require_ulfm()
        self.device = choose_device(options.device)
        self.where = f" on {self.device.type}"
        if options.device == "auto" and (unseen := unseen_gpu(self.device)):
            self.say(unseen)
        for topology in graphs.values():
            check_train(options, algorithm, topology)

    def set_threads(self, threads: int) -> None:
        set_threads(threads, self.startup.sharing)

    def choose(self, spec: Spec[Any], graphs: Graphs, model: nn.Module, shard: Shard) -> Plan:
        options = self.options
        given = {"topology": options.topology, "wire": options.wire}
        with self.alone():
            return make_plan(
                model,
                lambda k: backward(spec.task, model, shard, options.seed, k),
                spec.algorithm,
                Allowed.of(options.choice, spec.algorithm, **given),
                self.comm,
                graphs=graphs,
                buffers=options.buffers,
                factor=max(1.0, slowdowns(options.slow, self.n)[self.part]),
                jitter=options.jitter,
                timeout_s=options.timeout or None,
                progress=options.progress,
                staging=options.staging,
            )

    def parts_of(self, found: Checkpoint, average: bool) -> list[int]:
        if average:  # by rank 0 alone: an Agent starts from its model
            return list(range(found.count)) if self.first else []
        return list(self.here)

    def make_runner(
        self, models: Models, optimizers: Optimizers, algorithm: Algorithm, topology: Topology
    ) -> AgentRunner:
        options, (model,), (optimizer,) = self.options, models, optimizers
        if self.trace is not None:
            self.trace.align(self.startup.clock_offset())
        return AgentRunner(
            model, optimizer, algorithm, topology, self.comm, buffers=options.buffers,
            wire=options.wire_dtype(next(model.parameters()).dtype), progress=options.progress,
            staging=options.staging, timeout_s=options.timeout or None,
            late=options.late_policy(), trace=self.trace,
        )  # fmt: skip

    def make_slowdown(self, runner: AgentRunner | Swarm) -> Slowdown:
        assert isinstance(runner, AgentRunner)
        options, transport = self.options, runner.transport
        poll = transport.poll if transport.progress == "poll" else None
        return Slowdown(options.slow, options.jitter, options.seed, self.n, runner.rank, poll)

    def ready(self, session: Session) -> None:
        """From here on a late rank is explained by its board."""
        options, loop = self.options, session.loop
        assert isinstance(session.runner, AgentRunner)
        if session.in_folder:
            session.runner.transport.watch(session.plan.path)
        if options.retune:
            Retuner(loop, Bounds.parse(options.choice["tau"]), options.retune)
        self.recovery = Recovery(session, options, session.runner)

    def run(self, session: Session) -> None:
        assert self.recovery is not None
        self.recovery.run()

    def finish(self, session: Session) -> None:
        assert self.recovery is not None
        self.recovery.finish()
        self.recovery.transport.stop_watching()
        if self.trace is not None and session.in_folder:
            self.trace.align(self.startup.clock_offset())
            problem = write_trace(self.trace, session.plan.path, self.gather)
            session.report.console.warn(problem)

    def leave(self, told: str) -> str:
        if self.options.on_failure == "shrink":
            return ulfm.meet(self.comm, self.options.timeout or None, told)
        return self.gather(told)[0]  # MPI_Finalize would wait for a stopped rank for ever

    @property
    def took_over(self) -> bool:  # type: ignore[override]
        recovery = self.recovery
        return recovery is not None and bool(recovery.lost) and recovery.transport.rank == 0

    def about_transport(self, runner: AgentRunner | Swarm) -> dict[str, Any]:
        assert isinstance(runner, AgentRunner)
        transport = runner.transport
        return {"transport": {"progress": transport.progress, "native": transport.native}}

    def about_end(self) -> dict[str, Any]:
        assert self.recovery is not None
        return self.recovery.about()


@contextlib.contextmanager
def alone(
    comm: Any, prog: str, errors: type[BaseException] = BaseException, survived: bool = False
) -> Iterator[None]:
    """An error that one rank meets by itself ends the job: nobody waits for it in MPI_Finalize.

    Where the others can survive it, an unforeseen one ends this rank only.
    """
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
            shown = "".join(f"{prog}: {text}\n" for text in (str(error), error.everybody) if text)
        elif code is not None:
            shown = f"{prog}: rank {comm.rank}: {' '.join(str(error).split())}\n"
        elif death := explained_by_death(error):
            shown = f"{prog}: {death}; go on with --resume auto\n"
        elif survived and isinstance(error, Exception):
            end_rank(
                f"{prog}: rank {comm.rank} failed, the others go on:\n{traceback.format_exc()}"
            )
        elif not isinstance(error, KeyboardInterrupt):
            shown = f"{prog}: rank {comm.rank} failed, the job ends:\n{traceback.format_exc()}"
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
