"""Model-sized buffers of an agent beyond parameters, gradients and optimizer state.

Measured: growth of the process's resident memory from before the model exists, in units of one
model, less the model itself, its gradient and the optimizer's state; `held` at round boundaries,
`peak` at any moment of a round. Computed: what the schedule keeps (snapshot and received models of
every open flight, all-reduce buffers, named state). OLDSGD is allowed degree + 1, in P fragments
(degree + 1) / P.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .. import algorithms
from ..algorithms import Algorithm
from ..algorithms.fragments import Fragmented
from ..checkpoints.store import Gather
from ..cli.fields import at_least
from ..data import Arrays, Batch, Source
from ..errors import UserError
from ..runs.mpi_start import start_mpi
from ..runs.session import Session
from ..runs.spec import Spec
from ..tasks import Task
from ..tasks.base import Split
from ..training.options import TrainOptions

TAU, ALPHA = 2, 1e-6
M_MMAP_THRESHOLD = -3  # of malloc.h
STATE = {"sgd": 0, "momentum": 1, "adamw": 2}  # model-sized buffers of the optimizer

# The mean model and x as it was, for the exact consensus distance; the state while it is written.
EXTRA = {"metrics": 2, "checkpoint": 3}


@dataclass(frozen=True)
class Options:
    """Memory of an agent in model-sized buffers, measured against computed; run under mpirun."""

    algorithm: tuple[str, ...] = ("oldsgd", "ldsgd", "kgt", "lugt", "led", "lsgd", "co2")
    """One or several; `all` for every one there is."""
    fragments: tuple[int, ...] = (5,)
    """Also in so many fragments, those that can."""
    topology: str = "ring"
    """Who talks to whom."""
    optimizer: Literal["sgd", "momentum", "adamw"] = "sgd"
    """Its state is no part of what is counted."""
    side: int = 4000
    """The model is one matrix of side x side float32 numbers: 64 MB."""
    wire: Literal["same", "bf16", "fp16", "int8", "int4"] = "same"
    """What travels; int8 and int4 keep public copies, on a graph that changes for each phase."""
    rounds: int = 4
    """Rounds of two steps, or of as many as there are fragments."""
    json: bool = False
    """Print one line of JSON after the text."""

    def __post_init__(self) -> None:
        at_least(1000, self, "side")  # a smaller model is not seen
        at_least(2, self, "rounds")
        at_least(1, self, "fragments")


@dataclass(kw_only=True)
class Matrix(Task):
    """One large matrix and next to no data: all memory is the model's."""

    side: int = 4000
    batch: int = 1

    def model(self) -> nn.Module:
        return nn.Linear(self.side, self.side, bias=False)

    def source(self, split: Split) -> Source:
        return Arrays((np.ones((16, 1), dtype=np.float32), np.zeros(16, dtype=np.int64)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0].expand(-1, self.side)).square().mean()

    def measure(self, model: nn.Module, batches: Any) -> dict[str, float]:
        losses = [float(self.loss(model, batch)) for batch in batches]
        return {"loss": sum(losses) / len(losses), "accuracy": 0.0}


class Meter:
    """Resident memory of this process in units of one model."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.start = resident("RssAnon")
        self.peak_start = resident("VmRSS")
        self.held = 0.0
        self.reset()

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again

    def look(self, _: object = None) -> None:
        self.held = max(self.held, (resident("RssAnon") - self.start) / self.unit_bytes)

    @property
    def peak(self) -> float:
        return (resident("VmHWM") - self.peak_start) / self.unit_bytes


def resident(field: str, table: str = "/proc/self/status") -> int:
    """Bytes, as the kernel's table of this process says, or one of the machine."""
    for line in Path(table).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"this command reads {field} in {table}, where there is none")


def main(options: Options) -> None:

    comm = start_mpi("hpc_oldsgd.bench memory")
    torch.set_num_threads(1)
    give_back_at_once()
    names = algorithms.names() if "all" in options.algorithm else list(options.algorithm)
    small = dataclasses.replace(options, side=1000)
    _loop_row(small, "metrics")  # what is loaded and opened only once
    made = [algorithms.near_tau(name, TAU) for name in names]
    made += [
        replace(algorithm.with_tau(max(P, TAU)), fragments=P)
        for algorithm in made if isinstance(algorithm, Fragmented) and algorithm.tau > 1
        for P in options.fragments if P > 1
    ]  # fmt: skip
    results = [_row(options, comm, algorithm) for algorithm in made]
    if "oldsgd" in names:
        results += [_loop_row(options, what) for what in EXTRA]
    if comm.rank == 0:
        print(_text(options, comm.size, results))
        if options.json:
            print(json.dumps({"options": dataclasses.asdict(options), "results": results}))


def give_back_at_once() -> None:
    """Freed buffers leave the process, where the C library is glibc: else a row whose buffers are
    small would be given those of the row before, and seem to need none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _row(options: Options, comm: Any, algorithm: Algorithm) -> dict[str, Any]:
    """One algorithm: an agent of its own in a loop of its own, and the fullest rank's numbers."""
    from ..runtime.agent import Agent

    gc.collect()
    task = Matrix(side=options.side)
    meter = Meter(4 * options.side**2)
    model = task.model()
    optimizer = _run_options(options).make_optimizer(model, ALPHA)
    agent = Agent(
        model,
        optimizer,
        algorithm,
        options.topology,
        comm,
        sync=False,
        wire=_run_options(options).wire_dtype(torch.float32),
    )
    meter.reset()
    agent.observers.append(meter.look)
    batch = (torch.ones(1, 1),)
    while agent.r < options.rounds and not agent.finished:
        optimizer.zero_grad(set_to_none=not agent.algorithm.reads_gradient)
        task.loss(model, batch).backward()
        agent.step()
    numbers = _fullest(options, meter, agent, agent.transport.gather_text)
    agent.finish()
    P = algorithm.P
    return {"algorithm": algorithm.name + (f" P={P}" if P > 1 else ""), "fragments": P, **numbers}


def _loop_row(options: Options, what: str) -> dict[str, Any]:
    """OLDSGD in the run of `train`, with a row or a checkpoint under way nearly all the time."""
    from ..runs.mpi_backend import Mpi
    from ..transport.mpi import world
    from ..transport.mpi.collectives import gather_text

    gc.collect()
    meter = Meter(4 * options.side**2)
    with tempfile.TemporaryDirectory() as own:
        folder = gather_text(world(), own)[0]  # rank 0's is everybody's
        run_options = _run_options(
            options, iterations=TAU * options.rounds, out=Path(folder) / "run",
            eval_every=2 if what == "metrics" else 10**6, checkpoint_seconds=0.0,
            checkpoint_every=2 if what == "checkpoint" else 0,
        )  # fmt: skip
        spec = Spec(run_options, algorithms.near_tau("oldsgd", TAU), Matrix(side=options.side))
        backend = Mpi(run_options, "bench memory", lambda text: None)
        session = Session(spec, backend, in_folder=what == "checkpoint")
        meter.reset()
        session.runner.observers.append(meter.look)
        session.run()
    numbers = _fullest(options, meter, session.runner, backend.gather)
    numbers["computed"] += EXTRA[what]
    if what == "checkpoint" and session.runner.transport.streams is not None:
        numbers["computed"] += session.topology.period  # the own copies are part of the state
    return {"algorithm": f"oldsgd + {what}", "fragments": 1, **numbers}


def _run_options(options: Options, **more: Any) -> TrainOptions:
    return TrainOptions(
        topology=options.topology, alpha=ALPHA, threads=1, wire=options.wire,
        optimizer="adamw" if options.optimizer == "adamw" else "sgd",
        momentum=0.9 if options.optimizer == "momentum" else 0.0, **more,
    )  # fmt: skip


def _fullest(options: Options, meter: Meter, agent: Any, gather: Gather) -> dict[str, Any]:
    """The largest of all ranks: measured, and computed from what the schedule has opened."""
    transport = agent.transport
    degree = len(transport.topology.neighbours(transport.rank, 0))
    itemsize = transport.wire_type(torch.float32).itemsize
    share = 1 / agent.algorithm.P  # of a model that one flight carries
    flights = len(transport._channels) * (degree + 1) * share * itemsize / 4
    reductions = len(transport._rings) * (1 + 1 / transport.n)
    state = agent.algorithm.state_dict().values()
    not_counted = 2 + STATE[options.optimizer]  # the model, its gradient
    own = {
        "held": meter.held - not_counted,
        "peak": meter.peak - not_counted,
        "computed": flights + reductions + sum(t.numel() for t in state) / agent.x.numel(),
        "degree": degree,
    }
    if transport.streams is not None:  # copies of every stream, and messages
        messages = sum(c.nbytes * (1 + len(c.received)) for c in transport._channels)
        narrow = (transport.streams.held_bytes + messages) / meter.unit_bytes
        own["computed"] = narrow + reductions + len(agent.algorithm.state_dict())
    ranks = [json.loads(text) for text in gather(json.dumps(own))]
    return {key: max(rank[key] for rank in ranks) for key in own}


def _text(options: Options, n: int, results: list[dict[str, Any]]) -> str:
    megabytes = 4 * options.side**2 / 1e6
    lines = [
        f"{n} ranks, {options.topology}, model of {megabytes:.0f} MB, {options.optimizer}, wire "
        f"{options.wire}; buffers "
        "of that size beyond parameters, gradients and optimizer state, of the fullest rank",
        "",
        f"{'algorithm':<24}{'computed':>9}{'held':>8}{'peak':>8}{'allowed':>9}",
    ]
    for r in results:
        plain = r["algorithm"] in ("oldsgd", f"oldsgd P={r['fragments']}")
        whole = plain and options.wire == "same"  # a narrow wire keeps copies, a 16-bit one less
        allowed = f"{(r['degree'] + 1) / r['fragments']:g}" if whole else ""
        lines.append(
            f"{r['algorithm']:<24}{r['computed']:>9.2f}{r['held']:>8.2f}{r['peak']:>8.2f}"
            f"{allowed:>9}"
        )
    notes = [
        "held: at round boundaries; peak: at any moment, temporaries of a step included.",
        "metrics: the mean model, its average, x as it was; checkpoint: these for the last row,",
        "and a copy of the state while it is written.",
    ]
    return "\n".join([*lines, "", *notes])
