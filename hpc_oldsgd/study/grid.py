"""Options that all studies share, and the runs that they ask for."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import algorithms, cli, tasks
from .. import topology as topologies
from ..cli.fields import at_least, positive
from ..errors import UserError
from ..tasks import Task
from ..training.options import SimulateOptions
from . import paper, rows
from .cells import Cell

TAUS = (1, 3, 5, 10, 15, 20, 30, 40)  # the paper's
QUICK_TAUS = (1, 5, 20)
QUICK_ROWS = ("oldsgd", "oldsgd:fragments=tau", "ldsgd", "kgt", "lsgd", "lugt")
PARTITIONS = ("iid", "label:0.7")


@dataclass(frozen=True)
class Defaults:
    """How a task is run when the user says nothing else."""

    alpha: float
    iterations: int  # the most; a run ends at its target
    target: float
    every: int  # iterations between two rows, whole rounds
    samples: int = 2000
    partitions: tuple[str, ...] = PARTITIONS
    gradients: str = "each"  # or together: faster for a small CNN


DEFAULTS = {
    "digits": Defaults(0.1, 200, 0.90, 5, 300, gradients="together"),
    "logistic": Defaults(0.05, 240, 0.90, 5, 500),
    "cifar10-small": Defaults(0.1, 3_500, 0.60, 40, 1000, gradients="together"),
    "cifar10-vgg11": Defaults(0.01, 12_000, 0.70, 100),
    "cifar10-resnet18": Defaults(0.01, 12_000, 0.70, 100),
    "wikitext2-gpt2": Defaults(0.01, 6_000, 40.0, 100, 500, ("iid",)),
}


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What every study that trains can be told."""

    task: str = "digits"
    """Model and data; cifar10-vgg11 is the paper's setup, cifar10-small one for CPUs."""
    out: Path | None = None
    """Folder of the study; studies/TASK if not given. Studies with the same folder share runs."""
    quick: bool = False
    """A part of the grid: minutes on two cores with the digits."""
    target: float | None = None
    """Test accuracy, as 0.9, or perplexity to reach; the task's own if not given."""
    iterations: int | None = None
    """Gradients per agent at most; the task's own number if not given."""
    alpha: float | None = None
    """Step size; the study's own for the task if not given."""
    every: int | None = None
    """Iterations between two measurements, in whole rounds; the study's own if not given."""
    seeds: tuple[int, ...] = (0,)
    """A run for each; times are means over them."""
    options: str = ""
    """More options of `simulate` for every run, as --options="--batchnorm --topology torus"."""
    also: tuple[Path, ...] = ()
    """More folders with runs that count, or files that `study pack` wrote."""
    mpi: bool = False
    """Run over MPI, in wall time, in place of the simulator."""
    launcher: str = "mpirun -n {n}"
    """With --mpi: what starts a run."""
    jobs: int = 0
    """Simulations at a time, each on one core; 0 for as many as there are cores."""
    dry_run: bool = False
    """Only say what would run and how long it may take."""
    report_only: bool = False
    """Run nothing: report on the runs that are there."""
    write: Path | None = None
    """A page whose block of this study is brought up to date, as docs/results.md."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise UserError("--seeds must be one or more numbers.")
        at_least(0, self, "jobs", "c")
        at_least(1, self, "tau", "agents", "every", "iterations", "factor")
        positive(self, "alpha", "target")
        if self.mpi and "{n}" not in self.launcher:
            raise UserError(f"--launcher needs {{n}} for the number of ranks: {self.launcher!r}")
        for place in self.also:
            if not place.exists():
                raise UserError(f"--also {place}: there is no such folder or file.")
        for row in several(getattr(self, "algorithm", None)):
            rows.check(row)

    @property
    def clocks(self) -> tuple[float, ...]:
        """Each c to report on; over MPI one that is not a number."""
        return (math.nan,) if self.mpi else several(getattr(self, "c", None))


def several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


class Grid:
    """Makes the cells of a study."""

    def __init__(self, options: StudyOptions) -> None:
        self.options = options
        words = ["--task", options.task, *shlex.split(options.options)]
        base: Any = {"algorithm": {"oldsgd": algorithms.get("oldsgd")}, "task": tasks.registry()}
        self.base, chosen = cli.parse_staged(SimulateOptions, base, words)
        self.task: Task = chosen["task"]
        self._check_clock()
        # The defaults say how often and on what to measure, unless the user does.
        told = {"eval_every": "--eval-every", "eval_samples": "--eval-samples",
                "final_test": "--final-test"}  # fmt: skip
        self.told = {name: getattr(self.base, name) for name, word in told.items() if word in words}
        self.defaults = self._defaults()

    def _check_clock(self) -> None:
        """Refuse options whose effect a study would leave out of its times."""
        base, mpi = self.base, self.options.mpi
        wrong = {
            "--c": base.c != 1.0, "--degree-aware": base.degree_aware,
            "--slow": base.slow and not mpi, "--jitter": base.jitter and not mpi,
            "--late reuse": base.late == "reuse" and not mpi,
        }  # fmt: skip
        for name in (name for name, given in wrong.items() if given):
            raise UserError(
                f"--options cannot set {name}: a study times its runs itself. Its own --c sets c, "
                "study stragglers slow agents, study topologies costs by degree; simulate the rest."
            )

    def _defaults(self) -> Defaults:
        options, task = self.options, self.task
        known = DEFAULTS.get(task.name)
        if known is None:
            if options.target is None:
                raise UserError(f"--target is missing: no study knows one for {task.name}.")
            length = task.default_iterations
            known = Defaults(task.default_alpha, length, options.target, max(1, length // 50))
        if getattr(task, "batchnorm", False):  # its statistics are each agent's own
            known = dataclasses.replace(known, gradients="each")
        given: dict[str, Any] = {
            "alpha": options.alpha or self.base.alpha,
            "iterations": options.iterations or self.base.iterations,
            "target": options.target or self.base.target,
            "every": options.every,
        }
        return dataclasses.replace(known, **{k: v for k, v in given.items() if v is not None})

    @property
    def out(self) -> Path:
        return self.options.out or Path("studies") / self.task.name

    @property
    def agents(self) -> int:
        """As many as the paper has for such a model."""
        return paper.SETUP["agents"][paper.nearest(self.task.name)]

    @property
    def partitions(self) -> tuple[str, ...]:
        return self.defaults.partitions

    def cell(self, row: str, tau: int, seed: int = 0, **more: Any) -> Cell | None:
        """None where the algorithm takes another number of steps a round."""
        made = rows.make(row, tau)
        if made is None:
            return None
        known, n, graph = self.defaults, more.get("agents") or self.agents, rows.graph(row)
        if graph:
            topologies.from_name(graph, n)  # refused before anything runs
        changes = {
            "algorithm": made.name, "seed": seed, "alpha": known.alpha,
            "iterations": known.iterations, "target": known.target, "final_test": False,
            "eval_every": max(1, known.every // tau), "eval_samples": known.samples,
            "keep": 1, "threads": 0 if self.options.mpi else 1, "gradients": known.gradients,
            **self.told, **more, **({"topology": graph} if graph else {}), "agents": n,
        }  # fmt: skip
        config = dataclasses.replace(self.base, **changes)
        return Cell(config, made, self.task, self.options.mpi, row)

    def cells(
        self, names: Sequence[str], taus: Sequence[int], seeds: Sequence[int] = (), **more: Any
    ) -> list[Cell]:
        made = (
            self.cell(name, tau, seed, **more)
            for name in names
            for tau in taus
            for seed in seeds or self.options.seeds
        )
        return [cell for cell in made if cell is not None]
