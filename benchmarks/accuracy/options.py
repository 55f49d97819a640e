"""What is asked for, and what a folder of results must agree with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_oldsgd import cli, tasks
from hpc_oldsgd.errors import UserError

from .contestants import AUTO, CONTESTANTS

EVERYBODY = (
    AUTO, "moldsgd-auto", "oldsgd", "xoldsgd, P = tau", "moldsgd, P = tau", "ldsgd",
    "lsgd", "diloco", "post-local SGD", "ddp", "ddp, fp16 hook", "ddp, PowerSGD hook", "decent-dp",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Seconds to a target over links of known speed: ours beside DDP and others."""

    task: str = "digits"
    """Model and data: a task of hpc_oldsgd, e.g. cifar10-small or wikitext2-gpt2."""
    options: str = ""
    """Options of the task in one word, e.g. --options="--size tiny --seq 64"."""
    entry: tuple[str, ...] = EVERYBODY
    """Contestants; the others are compared with the first one."""
    ranks: int = 4
    """Agents."""
    ratio: tuple[float, ...] = (1.0, 5.0, 20.0)
    """How many gradients long one fp32 message of the whole model is on the link."""
    repeats: int = 2
    """How often, each time with another start and other batches."""
    target: float = 0.95
    """The number that ends a run: test accuracy to be reached from below, perplexity from above."""
    limit: float = 60.0
    """Seconds after which a contestant has failed."""
    give_up: float = 3.0
    """The same, in times of what the first contestant took there; 0 does not give up."""
    tau: tuple[int, ...] = (1, 5, 20, 60)
    """Local steps a round. Of several, a pilot run on each link finds each contestant's best."""
    pilot: float = 6.0
    """Seconds of a pilot run."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The local optimizer, or that of DDP."""
    alpha: float = 0.0
    """Step size; the task's own if 0."""
    momentum: float = 0.0
    """Momentum of SGD."""
    every: int = 25
    """Gradients between two measured models."""
    pause: float = 8.0
    """Seconds of training between two pauses of the clock."""
    test_samples: int = 2000
    """Size of the fixed sample of the test set."""
    seconds: float = 0.0
    """Start nothing new after as many seconds, to be continued by the same command; 0: no end."""
    output: Path | None = None
    """Folder for the results, which can be continued, and the figure."""

    def __post_init__(self) -> None:
        known = [*CONTESTANTS]
        for name in self.entry:
            if name not in known:
                raise UserError(f"There is no {name}; known are {'; '.join(known)}.")
        self.make_task()
        whole = (self.ranks - 1, self.repeats, self.every, self.test_samples, *self.tau)
        if min(whole) < 1 or min(*self.ratio, self.limit, self.pilot, self.pause, 1.0) <= 0:
            raise UserError("--ranks must be at least 2, all other numbers positive.")

    def make_task(self) -> tasks.Task:
        return cli.parse(tasks.get(self.task), self.options.split())

    @property
    def primary(self) -> tuple[str, bool]:
        """The number that counts, and whether it grows."""
        name, better = tasks.get(self.task).primary
        return name, better == "max"

    def identity(self) -> dict[str, Any]:
        """Results of other numbers than these cannot stand in one table."""
        names = ("task", "options", "ranks", "target", "optimizer", "alpha", "momentum", "every",
                 "pause", "test_samples")  # fmt: skip
        return {name: getattr(self, name) for name in names}


def from_json(text: str) -> Options:
    told: dict[str, Any] = json.loads(text)
    given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    return Options(**given)
