"""The options of a run, the same for `train` over MPI and `simulate` in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from .data.partition import parse as parse_partition
from .errors import UserError


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
    alpha: float | None = None
    """Step size; the task's own if not given (0.01 for the paper's tasks)."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """What each agent does with its gradient."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay of the optimizer."""
    buffers: Literal["mix", "local"] = "mix"
    """Whether BatchNorm statistics and other float buffers are mixed with the parameters."""
    wire: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Type of what travels; bf16 halves the bytes and keeps the mean model exact."""
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
    on_signal: Literal["stop", "continue"] = "stop"
    """What follows the checkpoint that SIGUSR1 asks for; SIGTERM always stops. A stopped run exits
    with 75."""

    def __post_init__(self) -> None:
        positive = {"iterations": self.iterations, "alpha": self.alpha}
        for name, value in positive.items():
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{name} must be positive, not {value:g}")
        at_least_zero = {
            "momentum": self.momentum,
            "weight-decay": self.weight_decay,
            "eval-every": self.eval_every,
            "seed": self.seed,
            "checkpoint-every": self.checkpoint_every,
            "checkpoint-seconds": self.checkpoint_seconds,
        }
        for name, number in at_least_zero.items():
            if not 0 <= number < float("inf"):
                raise UserError(f"--{name} must be at least 0, not {number:g}")
        if self.eval_samples < 1:
            raise UserError(f"--eval-samples must be at least 1, not {self.eval_samples}")
        if self.keep < 1:
            raise UserError(f"--keep must be at least 1, not {self.keep}")
        if self.resume == "auto" and self.out is None:
            raise UserError("--resume auto needs --out, the folder of the run to go on with")
        if self.resume_average and self.resume in ("never", "auto"):
            raise UserError("--resume-average needs --resume RUN, the run whose mean to start from")
        if self.resume != "never" and self.overwrite:
            raise UserError("--resume goes on with a run, --overwrite replaces it: choose one")
        if self.momentum and self.optimizer != "sgd":
            raise UserError("--momentum belongs to --optimizer sgd")
        parse_partition(self.partition)

    def make_optimizer(self, model: torch.nn.Module, alpha: float) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=alpha, weight_decay=self.weight_decay)
        return torch.optim.SGD(
            parameters, lr=alpha, momentum=self.momentum, weight_decay=self.weight_decay
        )

    def wire_dtype(self, model: torch.dtype) -> torch.dtype | None:
        from .agent import wire_type

        return None if self.wire == "same" else wire_type(self.wire, model)


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
    """Torch threads per rank; 0 divides the machine's cores among its ranks."""
    timeout: float = 600.0
    """Seconds to wait for a neighbour before the job ends; 0 waits for ever."""
    trace: bool = False
    """Write a Chrome/Perfetto trace of compute, flight, wait and mix on all ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads < 0 or self.timeout < 0:
            raise UserError("--threads and --timeout must be at least 0")


@dataclass(kw_only=True)
class SimulateOptions(RunOptions):
    """The same run in one process and in simulated time: python -m hpc_oldsgd.simulate"""

    agents: int = 9
    """Number of agents."""
    c: float = 1.0
    """Time of a model-sized message, in units of one gradient."""
    slow: tuple[str, ...] = field(default=())
    """Slow agents as AGENT:FACTOR, e.g. 3:2.5 takes 2.5 units for a gradient."""
    jitter: float = 0.0
    """Relative standard deviation of every gradient's time."""
    degree_aware: bool = False
    """Charge one message per neighbour instead of one per exchange."""
    threads: int = 0
    """Torch threads; 0 leaves torch's choice. 1 gives the same bits as a run over MPI."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agents < 1:
            raise UserError(f"--agents must be at least 1, not {self.agents}")

    def speeds(self) -> list[float]:
        speed = [1.0] * self.agents
        for text in self.slow:
            agent, _, factor = text.partition(":")
            try:
                i, slowdown = int(agent), float(factor)
            except ValueError:
                raise UserError(f"--slow takes AGENT:FACTOR, as in 3:2.5, not {text!r}") from None
            if not 0 <= i < self.agents or not slowdown > 0:
                raise UserError(
                    f"--slow {text}: the agent must be 0 to {self.agents - 1}, the factor positive"
                )
            speed[i] = 1.0 / slowdown
        return speed
