"""What a run is: its options, its algorithm and its task, read from a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from .. import algorithms, cli, tasks
from .. import topology as topologies
from ..algorithms import Algorithm
from ..errors import UserError
from ..simulation.slowdown import slowdowns
from ..tasks import Task
from ..topology import Topology
from ..training import tau_auto
from ..training.options import RunOptions, TrainOptions
from ..transport.late import NO_EDGES

O = TypeVar("O", bound=RunOptions)  # noqa: E741  options


@dataclass(frozen=True)
class Spec(Generic[O]):
    options: O
    algorithm: Algorithm
    task: Task

    @property
    def alpha(self) -> float:
        return self.options.alpha or self.task.default_alpha

    @property
    def iterations(self) -> int:
        return self.options.iterations or self.task.default_iterations

    def check(self, topology: Topology) -> None:
        """Raises UserError where the options do not fit the algorithm on this graph."""
        self.algorithm.check(topology)
        late = self.options.late_policy() is not None
        if late and "all_reduce" in tau_auto.kinds(self.algorithm, topology):
            raise UserError(NO_EDGES)


def check_train(options: TrainOptions, algorithm: Algorithm, topology: Topology) -> None:
    """What of `train`'s own options depends on the graph. Raises UserError; needs no MPI."""
    slowdowns(options.slow, topology.n)
    for name in options.left_to_choose():
        if options.progress == "none":
            raise UserError(
                f"--{name} auto needs messages that move during the gradients: --progress auto"
            )
    if options.auto_tau:
        tau_auto.check(algorithm, topology)


def parse(kind: type[O], prog: str, argv: Sequence[str] | None = None) -> Spec[O]:
    """From the command line of `prog`, or from the given words."""
    words, auto_fragments = take_fragments_auto(sys.argv[1:] if argv is None else argv)
    words, auto = take_tau_auto(words)
    if auto:
        words += enough_steps(words, auto)
    options, chosen = cli.parse_staged(
        kind,
        {"algorithm": algorithms.registry(), "task": tasks.registry()},
        words,
        prog=prog,
    )
    options.auto_fragments = auto_fragments
    if auto:
        options.auto_tau = auto
    elif getattr(options, "retune", 0):
        raise UserError("--retune changes tau during the run: add --tau auto")
    return Spec(options, chosen["algorithm"], chosen["task"])


def take_tau_auto(argv: Sequence[str]) -> tuple[list[str], str]:
    """The words without `--tau auto`, and its value; an empty value where tau is a number."""
    values = cli.values_of(argv, "tau")
    if not values or not values[0].startswith("auto"):
        return list(argv), ""
    tau_auto.Bounds.parse(values[0])
    return _without(argv, "--tau"), values[0]


def take_fragments_auto(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The words with `--fragments 1` in place of `--fragments auto`, and whether that was there."""
    if cli.values_of(argv, "fragments") != ["auto"]:
        return list(argv), False
    return [*_without(argv, "--fragments"), "--fragments", "1"], True


def _without(argv: Sequence[str], option: str) -> list[str]:
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            rest.append(word)
    return rest


def enough_steps(words: Sequence[str], auto: str) -> list[str]:
    """With `--tau auto`: a tau to begin with that allows the fragments asked for."""
    asked = cli.values_of(words, "fragments")
    if len(asked) != 1 or not asked[0].isdigit():
        return []
    count, most = int(asked[0]), tau_auto.Bounds.parse(auto).high
    if count > most:
        raise UserError(
            f"--fragments {count} needs as many local steps, and --tau {auto} allows {most}: "
            f"take fewer fragments, or --tau auto:{count}-{max(64, count)}"
        )
    return ["--tau", str(count)] if count > Algorithm.tau else []


def make_topology(options: RunOptions, n: int) -> Topology:
    """By name, or from a file where the name is one."""
    path = Path(options.topology)
    if path.suffix and path.is_file():
        topology = topologies.from_file(path)
        if topology.n != n:
            raise UserError(f"{path} is a graph of {topology.n} agents, not {n}")
        return topology
    return topologies.from_name(options.topology, n, weights=options.weights)
