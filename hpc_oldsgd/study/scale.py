"""Thousands of simulated agents: quadratics and logistic regression, every agent's data its own.

With alpha fixed the noise of the mean model falls as 1/n, so the loss it ends at should too, as
long as the graph mixes; f* is known, or found by Newton's method.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from .. import topology
from ..algorithms import with_tau
from ..cli.fields import at_least
from ..errors import UserError
from ..runs import folder as run_folder
from ..runs import reader
from ..runtime.plain import Plain
from ..runtime.runner import Runner
from ..simulation.clock import Clock
from ..simulation.stacked import StackedTransport
from . import figures
from .collect import Record, Table, pivot
from .report import Report, Section, duration

Floats = NDArray[np.float64]
D, SAMPLES, SEED = 20, 16, 0
SIGMA = 1.0  # of the noise on every coordinate of a quadratic's gradient
ALPHA = {"quadratic": 0.02, "logistic": 0.1}
MEASUREMENTS = 40  # in a run
TAIL = 0.25  # of a run: the mean there is where it ended


@dataclass(frozen=True, kw_only=True)
class Options:
    """64 to 4,096 simulated agents on logistic regression and quadratics."""

    agents: tuple[int, ...] = ()
    """How many; 64 256 1024 4096 if not given."""
    problem: tuple[str, ...] = ("quadratic", "logistic")
    """Which problems."""
    algorithm: tuple[str, ...] = ("oldsgd", "ldsgd")
    """Which algorithms."""
    topology: tuple[str, ...] = ("ring", "exponential")
    """Which graphs."""
    tau: int = 5
    """Local steps a round."""
    c: float = 5.0
    """Gradients that a message lasts."""
    iterations: int = 600
    """Gradients per agent."""
    quick: bool = False
    """Up to 1,024 agents, 300 iterations."""
    out: Path = Path("studies/scale")
    """Folder of the study."""
    write: Path | None = None
    """A page whose block of this study is brought up to date, as docs/results.md."""

    def __post_init__(self) -> None:
        for name in self.problem:
            if name not in ALPHA:
                raise UserError(f"--problem takes {' and '.join(ALPHA)}, not {name!r}.")
        at_least(1, self, "agents", "tau")
        at_least(self.tau, self, "iterations")
        at_least(0, self, "c")

    @property
    def sizes(self) -> list[int]:
        return sorted(
            set(self.agents or ((64, 256, 1024) if self.quick else (64, 256, 1024, 4096)))
        )

    @property
    def length(self) -> int:
        return min(self.iterations, 300) if self.quick else self.iterations


class Quadratic:
    """f_i(x) = (x - b_i)' diag(h_i) (x - b_i) / 2, gradients with noise of its own per agent."""

    def __init__(self, n: int) -> None:
        random = np.random.default_rng(SEED)
        self.h = random.uniform(0.5, 2.0, (n, D))
        self.b = 1.0 + random.normal(size=(n, D))
        self.noise = np.random.default_rng(SEED + 1)
        self.best = (self.h * self.b).mean(0) / self.h.mean(0)

    def gradient(self, X: Floats, k: int) -> Floats:
        return self.h * (X - self.b) + SIGMA * self.noise.standard_normal(X.shape)

    def loss(self, x: Floats) -> float:
        return float((self.h * np.square(x - self.b)).sum(1).mean() / 2)


class Logistic:
    """Labels from one model, features shifted by agent; a step draws one of an agent's samples."""

    def __init__(self, n: int) -> None:
        random = np.random.default_rng(SEED)
        truth = random.normal(size=D) / np.sqrt(D)  # first: the same for every n
        self.A = random.normal(size=(n, SAMPLES, D)) + 0.2 * random.normal(size=(n, 1, D))
        chance = 1 / (1 + np.exp(-2 * self.A @ truth))
        self.y = np.where(random.random((n, SAMPLES)) < chance, 1.0, -1.0)
        self.draw = np.random.default_rng(SEED + 1)
        self.best = self._newton()

    def gradient(self, X: Floats, k: int) -> Floats:
        agents = np.arange(len(X))
        picks = self.draw.integers(0, SAMPLES, len(X))
        a, y = self.A[agents, picks], self.y[agents, picks]
        weight = -y / (1 + np.exp(y * (a * X).sum(1)))
        return weight[:, None] * a + 0.01 * X

    def loss(self, x: Floats) -> float:
        margin = self.y * (self.A @ x)
        return float(np.logaddexp(0, -margin).mean() + 0.005 * x @ x)

    def _newton(self) -> Floats:
        A, y, x = self.A.reshape(-1, D), self.y.ravel(), np.zeros(D)
        for _ in range(20):
            s = 1 / (1 + np.exp(y * (A @ x)))
            g = -(A * (s * y)[:, None]).mean(0) + 0.01 * x
            H = (A * (s * (1 - s))[:, None]).T @ A / len(A) + 0.01 * np.eye(D)
            x = x - np.linalg.solve(H, g)
        return x


PROBLEMS: dict[str, Callable[[int], Any]] = {"quadratic": Quadratic, "logistic": Logistic}


def main(options: Options) -> None:
    wanted: list[Record] = [
        {"problem": problem, "algorithm": name, "topology": graph, "agents": n, "tau": options.tau,
         "c": options.c, "iterations": options.length}
        for problem in options.problem for name in options.algorithm
        for graph in options.topology for n in options.sizes
    ]  # fmt: skip
    runs = options.out / "runs"
    left = [known for known in wanted if read(runs / folder(known), known) is None]
    left.sort(key=lambda known: -known["agents"])  # the first tells how long all take
    steps = sum(known["agents"] * known["iterations"] for known in left)
    if left:
        ahead = duration(steps * gradient_seconds(left[0]))
        print(f"{len(left)} of {len(wanted)} runs to go, {steps:,} gradients, {ahead}", flush=True)
    agents = sum(known["agents"] for known in left)
    bar = tqdm(total=agents, unit="agents", disable=not sys.stderr.isatty())
    for known in left:
        bar.set_description(folder(known))
        run(known, runs / folder(known))
        bar.update(known["agents"])
    bar.close()
    table = [line(known, runs) for known in wanted]
    out = options.out / "scale"
    text = [
        f"d = {D}, tau = {options.tau}, c = {options.c:g}, {options.length} iterations, alpha = "
        f"{ALPHA['quadratic']:g} (quadratic) and {ALPHA['logistic']:g} (logistic). The gap is "
        "f(xbar) - f*, the mean over the last quarter of a run; a ratio of 4 from one size to the "
        "next is the 1/n of the theory.",
    ]
    sections = [
        Section("More agents, less noise", text, table, "scale", draw(table, out, options),
                gaps(table)),
        Section("Beside the paper", ["The paper goes up to 32 agents."]),
    ]  # fmt: skip
    Report("Thousands of agents", sections).publish(out, options.write)


def folder(known: Record) -> str:
    """A quick run does not replace the full one."""
    return "{problem}-{algorithm}-tau{tau}-{topology}-n{agents}-c{c:g}-{iterations}".format(**known)


def gradient_seconds(known: Record) -> float:
    """Of one agent's gradient and all around it, from a few rounds of this run."""
    few = {**known, "iterations": min(known["iterations"], 4 * known["tau"])}
    with tempfile.TemporaryDirectory() as place:
        start = time.perf_counter()
        run(few, Path(place) / "few")
        return (time.perf_counter() - start) / (few["agents"] * few["iterations"])


def run(known: Record, path: Path) -> None:
    """A run folder as any other; its task is the problem."""
    n, graph = known["agents"], topology.from_name(known["topology"], known["agents"])
    problem = PROBLEMS[known["problem"]](n)
    algorithm = with_tau(known["algorithm"], known["tau"])
    if algorithm is None:
        raise UserError(f"{known['algorithm']} takes one step a round: not {known['tau']}.")
    clock = Clock(n, known["c"])
    X = torch.zeros(n, D, dtype=torch.float64)
    runner = Plain(X, algorithm, StackedTransport(graph, clock), ALPHA[known["problem"]])
    rounds = -(-known["iterations"] // known["tau"])
    every, f_best = max(1, rounds // MEASUREMENTS), problem.loss(problem.best)
    run_folder.prepare(path, overwrite=True)
    files = run_folder.RunFolder(path)
    files.write(
        "config.json",
        {"known": known, "options": {"c": known["c"]}, "agents": n,
         "algorithm": {"name": algorithm.name, **algorithm.options()},
         "task": {"name": known["problem"]}, "alpha": ALPHA[known["problem"]],
         "topology": {"name": graph.name, "lambda_2": graph.lambda_2, "p": graph.p},
         "environment": run_folder.environment()},
    )  # fmt: skip
    start = time.perf_counter()

    def record(runner: Runner) -> None:
        if runner.r and runner.r % every == 0:
            x = X.numpy()
            mean = x.mean(0)
            gap = problem.loss(mean) - f_best
            apart = float(np.square(x - mean).sum(1).mean())
            files.row({"round": runner.r, "iteration": runner.t, "time": float(clock.t.max()),
                      "train_loss": gap, "consensus": apart})  # fmt: skip
        if runner.r == rounds:
            runner.stop()

    runner.on_round.append(record)
    runner.start()
    while not runner.finished:
        runner.advance(torch.from_numpy(problem.gradient(X.numpy(), runner.t)))
    runner.finish()
    seconds = time.perf_counter() - start
    files.summary({"time_unit": "units", "seconds": seconds, "gradients": n * runner.t})
    files.close()


def read(path: Path, known: Record) -> reader.Run | None:
    if not (path / "summary.json").is_file():
        return None
    (found,) = reader.read_one(path)
    return found if found.config.get("known") == known else None


def line(known: Record, runs: Path) -> Record:
    found = read(runs / folder(known), known)
    assert found is not None
    tail = found.rows[-max(1, round(TAIL * len(found.rows))) :]
    summary = reader.read_object(found.path / "summary.json")
    return {
        **{k: known[k] for k in ("problem", "algorithm", "topology", "agents")},
        "p": found.config["topology"]["p"],
        "gap": float(np.mean([row["train_loss"] for row in tail])),
        "consensus": float(np.mean([row["consensus"] for row in tail])),
        "simulated time": found.rows[-1]["time"],
        "gradients a second": summary["gradients"] / summary["seconds"],
    }


def gaps(table: Table) -> Table:
    """The gap at each number of agents, a line for each problem, algorithm and graph."""
    keys = ("problem", "algorithm", "topology")
    return pivot(({k: row[k] for k in keys}, f"n = {row['agents']:,}", row["gap"]) for row in table)


def draw(table: Table, out: Path, options: Options) -> Sequence[Path]:
    panels = []
    out.mkdir(parents=True, exist_ok=True)
    sizes = options.sizes
    for problem in options.problem:
        some = [
            {**row, "label": "{algorithm}, {topology}".format(**row), "gap": max(row["gap"], 1e-12)}
            for row in table if row["problem"] == problem
        ]  # fmt: skip
        drawn = figures.series(some, "label", "agents", "gap")
        first = max(ys[0] for _, ys in drawn.values())
        guide = {"1/n": (sizes, [first * sizes[0] / n for n in sizes])}
        panels.append(figures.Panel(problem, drawn, guides=guide))
    return figures.lines(out / "scale", panels, "agents", "f(xbar) - f*", log="xy", share_y=False)
