"""What a run is: its options, its algorithm and its task, read from a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from .. import algorithms, cli, tasks
from .. import topology as topologies
from ..algorithms import Algorithm
from ..errors import UserError
from ..simulation.slowdown import slowdowns
from ..tasks import Task
from ..topology import Topology
from ..training import plan
from ..training.choose import check_overlaps, kinds, with_fragments
from ..training.measure import graphs_for
from ..training.options import RunOptions, TrainOptions
from ..training.plan import ANY, KEYS, Bounds, Plan
from ..transport.late import NO_EDGES

O = TypeVar("O", bound=RunOptions)  # noqa: E741  options


@dataclass(frozen=True)
class Spec(Generic[O]):
    options: O
    algorithm: Algorithm
    task: Task
    plan: Plan | None = field(default=None, kw_only=True)
    """That of --plan."""

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
        if late and "all_reduce" in kinds(self.algorithm, topology):
            raise UserError(NO_EDGES)


def check_train(options: TrainOptions, algorithm: Algorithm, topology: Topology) -> None:
    """What of `train`'s own options depends on the graph. Raises UserError; needs no MPI."""
    slowdowns(options.slow, topology.n)
    if options.choice and options.progress == "none":
        asked = "" if options.auto else f"--{next(iter(options.choice))} "
        raise UserError(
            f"{asked or '--'}auto needs messages that move during the gradients: --progress auto"
        )
    if "tau" in options.choice:
        check_overlaps(algorithm, topology, Bounds.parse(options.choice["tau"]))


def parse(kind: type[O], prog: str, argv: Sequence[str] | None = None) -> Spec[O]:
    """From the command line of `prog`, or from the given words."""
    words, choice = take_choice(sys.argv[1:] if argv is None else argv)
    options, chosen = cli.parse_staged(
        kind,
        {"algorithm": algorithms.registry(), "task": tasks.registry()},
        words,
        prog=prog,
    )
    algorithm, told = chosen["algorithm"], None
    if isinstance(options, TrainOptions) and (options.auto or options.plan):
        refuse_given(options, words, choice)
        if options.plan:
            told = plan.read(options.plan)
            options.topology, options.wire = told.topology, told.wire  # type: ignore[assignment]
            algorithm = told.apply(algorithm)
        else:
            algorithm, choice = narrowed(algorithm, plan.parse_auto(options.auto))
    options.choice = choice
    if getattr(options, "retune", 0) and "tau" not in choice:
        raise UserError("--retune changes tau during the run: add --tau auto")
    return Spec(options, algorithm, chosen["task"], plan=told)


def refuse_given(options: TrainOptions, words: Sequence[str], choice: dict[str, str]) -> None:
    """What a plan says is not said twice."""
    if options.auto and options.plan:
        raise UserError("--auto makes a plan and --plan gives one back: choose one")
    for name in KEYS.values():
        if name in choice or cli.values_of(words, name):
            asked = "--plan" if options.plan else "--auto"
            hint = "" if options.plan else ", or narrow the choice as in --auto tau=5"
            raise UserError(f"{asked} chooses {name}: leave out --{name}{hint}")


def take_choice(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without `--tau auto` and `--fragments auto`, and these by option."""
    words, choice = [*argv], {}
    if words[-1:] == ["--auto"] or ("--auto" in words and not cli.values_of(words, "auto")):
        words[words.index("--auto")] = f"--auto={ANY}"
    if (cli.values_of(words, "tau") or [""])[0].startswith("auto"):
        choice["tau"] = cli.values_of(words, "tau")[0]
        bounds = Bounds.parse(choice["tau"])
        words = [*cli.without(words, {"--tau"}), *enough_steps(words, bounds, choice["tau"])]
    if cli.values_of(words, "fragments") == ["auto"]:
        choice["fragments"] = "auto"
        words = [*cli.without(words, {"--fragments"}), "--fragments", "1"]
    return words, choice


def enough_steps(words: Sequence[str], bounds: Bounds, asked: str) -> list[str]:
    """With `--tau auto`: a tau to begin with that allows the fragments asked for."""
    fragments = cli.values_of(words, "fragments")
    if len(fragments) != 1 or not fragments[0].isdigit():
        return []
    count, most = int(fragments[0]), bounds.high
    if count > most:
        raise UserError(
            f"--fragments {count} needs as many local steps, and --tau {asked} allows {most}: "
            f"take fewer fragments, or --tau auto:{count}-{max(64, count)}"
        )
    return ["--tau", str(count)] if count > Algorithm.tau else []


def narrowed(algorithm: Algorithm, choice: dict[str, str]) -> tuple[Algorithm, dict[str, str]]:
    """The algorithm to begin with, and what `--auto` leaves to choose for it."""
    fragments = choice["fragments"]
    if not plan.in_parts(algorithm):
        if fragments not in ("auto", "1"):
            raise UserError(f"--auto fragments={fragments}: {algorithm.name} sends x whole")
        del choice["fragments"]
    elif fragments != "auto":
        algorithm = with_fragments(algorithm, int(fragments))
    return algorithm, choice


def make_graphs(options: RunOptions, n: int) -> dict[str, Topology]:
    """Those that the run may choose from, by name; the given one if it is given."""
    if "topology" not in options.choice:
        return {options.topology: make_topology(options, n)}
    names = tuple(options.choice["topology"].split("|"))
    return graphs_for(names, lambda name: make_topology(replace(options, topology=name), n))


def make_topology(options: RunOptions, n: int) -> Topology:
    """By name, or from a file where the name is one."""
    path = Path(options.topology)
    if path.suffix and path.is_file():
        topology = topologies.from_file(path)
        if topology.n != n:
            raise UserError(f"{path} is a graph of {topology.n} agents, not {n}")
        return topology
    return topologies.from_name(options.topology, n, weights=options.weights)
