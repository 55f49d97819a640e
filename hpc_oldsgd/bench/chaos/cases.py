"""A random run that is cheap: its command line, drawn from what the package knows."""

from __future__ import annotations

import dataclasses
import random
import typing
from dataclasses import dataclass
from pathlib import Path

from ... import algorithms
from ...errors import UserError
from ...runs import spec
from ...runs.backend import Stacked
from ...runs.session import Session
from ...training.options import RunOptions, SimulateOptions

GRAPHS = (
    "ring", "complete", "star", "grid", "exponential", "one-peer-ring", "one-peer-exponential",
)  # fmt: skip
OPTIMIZERS = ("", "--momentum 0.9", "--optimizer adamw --weight-decay 0.01", "--weight-decay 0.1")
TASKS = (
    *3 * ("--task logistic --iterations 600",),
    "--task digits --batchnorm --iterations 90 --alpha 0.01",
)
PATIENT_S = 10_000  # --late reuse with nobody late changes no bit


@dataclass(frozen=True)
class Case:
    n: int
    words: tuple[str, ...]
    """Of `hpc_oldsgd.train`, without --out."""

    def __str__(self) -> str:
        return f"{self.n} ranks, {' '.join(self.words)}"


def wires() -> tuple[str, ...]:
    """All that `--wire` knows."""
    return typing.get_args(typing.get_type_hints(RunOptions)["wire"])


def draw(chance: random.Random) -> Case:
    """A run that its own command would not refuse."""
    while True:
        n = chance.choice((2, 2, 2, 3))
        words = tuple(_words(chance).split())
        try:
            asked = spec.parse(SimulateOptions, "", [*words, "--agents", str(n)])
            Session(asked, Stacked(asked.options), in_folder=False)
        except UserError:
            continue  # this graph, wire or number of fragments does not go with the rest
        return Case(n, words)


def _words(chance: random.Random) -> str:
    name = chance.choice(algorithms.names())
    own = {field.name for field in dataclasses.fields(algorithms.get(name))}
    tau = chance.choice((1, 2, 3, 4))
    words = [chance.choice(TASKS), f"--algorithm {name} --tau {tau}"]
    if "fragments" in own and tau > 1:
        words.append(f"--fragments {chance.randint(1, tau)}")
    words += [
        f"--topology {chance.choice(GRAPHS)} --weights {chance.choice(('auto', 'lazy'))}",
        chance.choice(OPTIMIZERS),
        f"--wire {chance.choice(wires())}",
        f"--partition {chance.choice(('iid', 'label:0.7'))} --seed {chance.randrange(1000)}",
        f"--checkpoint-every {chance.choice((1, 3, 5))} --keep {chance.choice((1, 2, 2, 3))}",
        f"--eval-every {chance.choice((2, 7))} --eval-samples 50 --no-final-test --threads 1",
        chance.choice((f"--late reuse --late-wait {PATIENT_S}", "", "", "")),
    ]
    return " ".join(words)


def out(case: Case, folder: Path) -> list[str]:
    return [*case.words, "--out", str(folder)]
