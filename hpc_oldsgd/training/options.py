"""The options of a run, the same for `train` over MPI and `simulate` in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from ..cli.fields import at_least, positive
from ..data.partition import parse as parse_partition
from ..errors import UserError
from ..runtime import sgd
from ..runtime.wire import wire_type
from ..simulation.slowdown import check_jitter, slowdowns
from ..transport.base import Wire
from ..transport.late import Late

LARGEST = 1e30
MOST_ITERATIONS = 1e15  # floats count no further one by one


@dataclass(kw_only=True)
class RunOptions:
    """What is trained, by which algorithm, on which graph."""

    algorithm: str = "oldsgd"
    """How the agents train together; adds options of its own, listed below."""
    task: str = "digits"
    """Model and data; adds options of its own, listed below."""
    topology: str = "ring"
    """Who talks to whom: ring, torus, torus:3x3, grid, complete, star, hypercube, exponential,
    one-peer-exponential, one-peer-ring, erdos-renyi, or a file with edges or a matrix."""
    weights: Literal["auto", "uniform", "metropolis", "lazy"] = "auto"
    """Mixing weights; auto is uniform where every agent has as many neighbours, else Metropolis."""
    partition: str = "iid"
    """How the data is split: iid, label:SHARE (the paper's heterogeneous case is label:0.7),
    dirichlet:ALPHA."""
    iterations: int | None = None
    """Gradients per agent, rounded up to whole rounds; the task's own number if not given."""
    target: float | None = None
    """Test accuracy, as 0.9, or test perplexity at which the run ends before its iterations."""
    alpha: float | None = None
    """Step size; the task's own if not given (0.01 for the paper's tasks)."""
    warmup: int = 0
    """Iterations over which the step size grows linearly to alpha, round by round; 0 for none."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """What each agent does with its gradient."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    buffers: Literal["mix", "local"] = "mix"
    """Whether BatchNorm statistics and other float buffers are mixed with the parameters."""
    wire: Literal["same", "fp32", "bf16", "fp16", "int8", "int4"] = "same"
    """Type of what travels; bf16 halves the bytes and keeps the mean model exact. So does fp16, for
    numbers up to 65504 only, which the variances of BatchNorm may exceed. int8 and int4 send the
    change since the last message in a quarter and an eighth of fp32's bytes, and keep it too."""
    seed: int = 0
    """Everything random follows from it."""
    eval_every: int = 0
    """Rounds between two evaluations of the mean model; 0 makes about twenty over the run."""
    eval_samples: int = 2000
    """Size of the fixed training sample for f(xbar), and limit on test samples while training."""
    final_test: bool = True
    """Measure the whole test set at the end; off, the closing row keeps to --eval-samples."""
    bn: Literal["average", "recalibrate"] = "average"
    """BatchNorm statistics of the mean model: averaged over agents, or estimated anew."""
    out: Path | None = None
    """Folder for the run; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the run that is in the folder."""
    tensorboard: bool = False
    """Write TensorBoard event files beside metrics.jsonl."""
    checkpoint_every: int = 0
    """Rounds between two checkpoints; 0 for none by count. The last round always leaves one."""
    checkpoint_seconds: float = 600.0
    """Seconds between two checkpoints; 0 for none by time."""
    keep: int = 2
    """Checkpoints kept; older ones are removed when a new one is complete."""
    resume: str = "never"
    """never; auto, from the newest checkpoint in --out if there is one; or a run's folder or one
    of its checkpoints."""
    resume_average: bool = False
    """With --resume: a fresh start from the mean of the checkpoint's models, for another number of
    agents or other options."""
    choice: dict[str, str] = field(default_factory=dict, metadata={"cli": False})
    """The options that the run chooses at its start, as they were asked for."""
    slow: tuple[str, ...] = field(default=())
    """Agents made slow, as AGENT:FACTOR: 3:2.5 takes 2.5 times as long for a gradient. Over MPI the
    agent sleeps after its real gradient."""
    jitter: float = 0.0
    """Relative standard deviation put on every gradient's time; over MPI it can only lengthen."""
    late: Literal["wait", "reuse"] = "wait"
    """What to do about a late neighbour: wait for it, or go on with its weight moved to oneself, at
    both ends of the edge, so that the mean is kept."""
    late_wait: float = 1.0
    """With --late reuse: how long to stand waiting first; seconds, or simulated units."""
    staleness: int = 1
    """With --late reuse: how many rounds in a row an edge may be left out before both ends wait."""
    on_signal: Literal["stop", "continue"] = "stop"
    """What follows the checkpoint that SIGUSR1 asks for; SIGTERM always stops. A stopped run exits
    with 75."""

    def __post_init__(self) -> None:
        positive(self, "iterations", "alpha", "target")
        if (self.iterations or 0) > MOST_ITERATIONS:
            raise UserError(f"--iterations must be at most {MOST_ITERATIONS:g}")
        at_least(0, self, "warmup", "momentum", "weight_decay", "eval_every", "seed")
        at_least(0, self, "checkpoint_every", "checkpoint_seconds")
        at_least(1, self, "eval_samples", "keep")
        for name in ("alpha", "momentum", "weight-decay"):
            if (getattr(self, name.replace("-", "_")) or 0) > LARGEST:
                raise UserError(f"--{name} must be at most {LARGEST:g}: float32 ends soon after")
        if self.resume == "auto" and self.out is None:
            raise UserError("--resume auto needs --out, the folder of the run to go on with")
        if self.resume_average and self.resume in ("never", "auto"):
            raise UserError("--resume-average needs --resume RUN, the run whose mean to start from")
        if self.resume != "never" and self.overwrite:
            raise UserError("--resume goes on with a run, --overwrite replaces it: choose one")
        if self.momentum and self.optimizer != "sgd":
            raise UserError("--momentum belongs to --optimizer sgd")
        parse_partition(self.partition)
        if self.tensorboard and find_spec("tensorboard") is None:
            raise UserError(
                "--tensorboard needs the tensorboard package: pip install 'hpc_oldsgd[tensorboard]'"
            )
        check_jitter(self.jitter)
        self.late_policy()

    def late_policy(self) -> Late | None:
        policy = Late(self.late_wait, self.staleness)
        return policy if self.late == "reuse" else None

    def make_optimizer(self, model: torch.nn.Module, alpha: float) -> sgd.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=alpha, weight_decay=self.weight_decay)
        if self.momentum:
            return torch.optim.SGD(
                parameters, lr=alpha, momentum=self.momentum, weight_decay=self.weight_decay
            )
        return sgd.SGD(parameters, lr=alpha, weight_decay=self.weight_decay)

    def wire_dtype(self, model: torch.dtype) -> Wire:
        return wire_type(self.wire, model)


@dataclass(kw_only=True)
class TrainOptions(RunOptions):
    """Train one model with one agent per MPI rank: mpirun -n 9 python -m hpc_oldsgd.train"""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes one GPU per rank where there are any."""
    progress: Literal["auto", "thread", "poll", "none"] = "auto"
    """Who moves messages while the agent computes: a thread, the backward pass, or nobody."""
    staging: Literal["auto", "direct", "host"] = "auto"
    """Device memory through pinned host buffers, or directly by a CUDA-aware MPI."""
    threads: int = 0
    """Torch threads per rank; 0 for one if the model has less than a million numbers, otherwise the
    rank's share of its cores."""
    timeout: float = 600.0
    """Seconds to wait for a neighbour before the job ends; 0 waits for ever."""
    on_failure: Literal["end", "shrink"] = "end"
    """What the death of a rank means: the end of the job, or that the others go on without it,
    which needs Open MPI started with --with-ft ulfm."""
    redistribute: bool = False
    """With --on-failure shrink: deal all data to the survivors anew, instead of losing the part
    of the dead agent."""
    trace: bool = False
    """Write a Chrome/Perfetto trace of compute, flight, wait and mix on all ranks."""
    auto: str = ""
    """Measure gradients and messages, then choose graph, wire, tau and fragments; alone, or with
    what may be chosen: 'graph=ring|torus,wire=fp32|bf16,tau=2-40,fragments=1'."""
    plan: Path | None = None
    """Take graph, wire, tau and fragments from a run with --auto: its folder or its config.json."""
    retune: int = 0
    """With --auto or --tau auto: rounds between two checks whether tau still hides the messages; 0
    keeps the tau of the start."""
    check: bool = False
    """Only check options, data and folder, in one process: no MPI, no job, nothing is written."""
    check_agents: tuple[int, ...] = field(default=())
    """With --check: for these numbers of agents; the job's number if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "retune", "threads", "timeout")
        at_least(1, self, "check_agents")
        if self.check_agents and not self.check:
            raise UserError("--check-agents belongs to --check")
        if self.redistribute and self.on_failure != "shrink":
            raise UserError("--redistribute belongs to --on-failure shrink")
        if self.trace and self.on_failure == "shrink":
            raise UserError("--trace needs all ranks to the end: leave it or --on-failure shrink")
        if self.late == "reuse" and self.on_failure == "shrink":
            raise UserError("--late reuse cannot be combined with --on-failure shrink")
        if self.retune and self.on_failure == "shrink":
            raise UserError("--retune needs all ranks to the end: leave it or --on-failure shrink")


@dataclass(kw_only=True)
class SimulateOptions(RunOptions):
    """The same run in one process and in simulated time: python -m hpc_oldsgd.simulate"""

    agents: int = 9
    """Number of agents."""
    c: float = 1.0
    """Time of a model-sized message, in units of one gradient."""
    degree_aware: bool = False
    """Charge one message per neighbour instead of one per exchange."""
    gradients: Literal["each", "together"] = "each"
    """One agent after the other, or all in one vectorised pass: faster for small models, equal up
    to rounding, not for BatchNorm or dropout."""
    threads: int = 0
    """Torch threads; 0 for one if the model has less than a million numbers, otherwise as many as
    torch takes. 1 gives the same bits as a run over MPI."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "agents")
        at_least(0, self, "threads")

    def speeds(self) -> list[float]:
        return [1.0 / factor for factor in slowdowns(self.slow, self.agents)]
