"""Weak scaling over real MPI: seconds a round on 2 to 32 ranks, with a gradient that sleeps.

An agent of OLDSGD has two neighbours on any ring, so its round takes as long on more ranks. A
ring all-reduce takes 2(n-1)/n of a message and 2(n-1) steps. Each size is one start of `bench
overlap`, on the slow network of bench/slow_net.sh, or by what --launcher names.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..algorithms import get
from ..bench import SLOW_NET
from ..errors import UserError
from ..files import replacing
from . import figures
from .collect import Table, grouped, overlap_result
from .costs import count
from .engine import launch
from .report import Report, Section, duration

WARM_UP = 2  # rounds that `bench overlap` adds


@dataclass(frozen=True, kw_only=True)
class Options:
    """Seconds a round over real MPI, 2 to 32 ranks, with an emulated gradient."""

    ranks: tuple[int, ...] = ()
    """How many; 2 4 8 16 32 if not given."""
    algorithm: tuple[str, ...] = ("oldsgd", "lsgd")
    """Which."""
    tau: int = 5
    """Local steps a round."""
    grad_seconds: float = 0.2
    """How long a gradient takes."""
    model_bytes: int = 1_000_000
    """Size of the model."""
    rate: str = "40mbit"
    """Of each rank's card on the slow network, as tc writes it."""
    rounds: int = 10
    """Measured rounds of each algorithm."""
    launcher: str = ""
    """What starts the ranks, with {n}, as "srun -n {n}"; the slow network if not given."""
    quick: bool = False
    """Only 2 and 4 ranks, 3 rounds."""
    out: Path = Path("studies")
    """Folder of the study."""
    write: Path | None = None
    """A page whose block of this study is brought up to date, as docs/results.md."""

    def __post_init__(self) -> None:
        if any(n < 2 for n in self.ranks):
            raise UserError("--ranks must be at least 2: one rank has nobody to talk to.")
        if self.launcher and "{n}" not in self.launcher:
            raise UserError(f"--launcher needs {{n}} for the number of ranks: {self.launcher!r}")

    @property
    def sizes(self) -> list[int]:
        return sorted(set(self.ranks or ((2, 4) if self.quick else (2, 4, 8, 16, 32))))

    @property
    def measured(self) -> int:
        return min(self.rounds, 3) if self.quick else self.rounds

    def command(self, n: int | str) -> list[str]:
        start = self.launcher.format(n=n) or f"{SLOW_NET} mpirun {n} {self.rate}"
        words = ["-m", "hpc_oldsgd.bench", "overlap", "--algorithm", *self.algorithm, "--json"]
        given = {
            "tau": self.tau, "grad-seconds": self.grad_seconds, "model-bytes": self.model_bytes,
            "rounds": self.measured,
        }  # fmt: skip
        words += [word for k, v in given.items() for word in (f"--{k}", str(v))]
        return [*shlex.split(start), sys.executable, *words]


def main(options: Options) -> None:
    runs = options.out / "runs"
    left = [n for n in options.sizes if read(runs / name(options, n), options) is None]
    if left:
        seconds = options.tau * options.grad_seconds * (options.measured + WARM_UP)
        seconds = len(left) * seconds * 1.5 * len(options.algorithm) + sum(left)
        print(f"{len(left)} of {len(options.sizes)} sizes to go, {duration(seconds)}", flush=True)
    for n in tqdm(left, unit="size", disable=not sys.stderr.isatty()):
        measure(options, n, runs / name(options, n))
    found = {n: read(runs / name(options, n), options) for n in options.sizes}
    table = lines({n: content for n, content in found.items() if content is not None})
    first = next(content for content in found.values() if content is not None)
    out = options.out / "weak"
    settings = first["settings"]
    text = [
        f"Real MPI ({settings['mpi']}), ring, {options.model_bytes / 1e6:g} MB, tau = "
        f"{options.tau}, gradients that sleep {options.grad_seconds:g} s, network "
        f"{settings['network'] or 'of the machine'}; medians of {settings['rounds']} rounds, of "
        "the slowest rank. Against the smallest size: 1 is flat. Compute alone: of a few gradients "
        "before the rounds, so it can exceed one.",
        *verdict(table),
    ]
    drawn = draw(table, out)
    sections = [Section("Seconds a round", text, table, "weak", drawn)]
    sections.append(Section("Beside the paper", [
        "The paper scales in simulated time only; these are messages between processes.",
    ]))  # fmt: skip
    shown = plain(shlex.join(options.command("N")))
    sections.append(Section("Commands", [f"What is measured, for each size N: `{shown}`"]))
    Report("Weak scaling over MPI", sections).publish(out, options.write)


def name(options: Options, n: int) -> str:
    """Of the run's folder, beside those of other options: another launcher is another network."""
    network = options.rate
    if options.launcher:
        network = hashlib.sha256(options.launcher.encode()).hexdigest()[:6]
    settings = f"tau{options.tau}-{options.grad_seconds:g}-{options.model_bytes}"
    return f"weak-n{n}-{settings}-{network}"


def plain(command: str) -> str:
    """As a reader would type it, from the project's folder."""
    root = str(SLOW_NET.parents[2])
    return command.replace(sys.executable, "python").replace(f"{root}/", "")


def measure(options: Options, n: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    with replacing(folder / "overlap.txt") as part, part.open("w") as file:
        launch(options.command(n), f"{n} ranks", stdout=file, env=environment)


def read(folder: Path, options: Options) -> dict[str, Any] | None:
    """What `bench overlap --json` printed last; None where it is not there or of other options."""
    try:
        content = overlap_result(folder / "overlap.txt")
        settings = content["settings"]
    except (OSError, ValueError, KeyError):
        return None
    same = ("tau", "grad_seconds", "model_bytes")
    known = {result["algorithm"] for result in content["results"]}
    fits = all(settings[k] == getattr(options, k) for k in same) and known >= set(options.algorithm)
    whole = settings["rounds"] >= options.measured  # a quick run is not the full one
    return content if fits and whole else None


def lines(found: dict[int, dict[str, Any]]) -> Table:
    table: Table = []
    least: dict[str, float] = {}
    for n, content in found.items():
        settings = content["settings"]
        for result in content["results"]:
            algorithm, seconds = result["algorithm"], result["round_s"]
            reduces = count(get(algorithm)()).all_reduces > 0  # what was timed alone is an exchange
            table.append(
                {
                    "algorithm": algorithm, "ranks": n, "seconds a round": seconds,
                    "against the smallest": seconds / least.setdefault(algorithm, seconds),
                    "compute alone": result["tau"] * settings["t_g"],
                    "exchange alone": None if reduces else settings["t_c"],
                    "hidden": result["hidden"],
                }
            )  # fmt: skip
    return sorted(table, key=lambda line: str(line["algorithm"]) != "oldsgd")


def verdict(table: Table) -> list[str]:
    said = []
    for algorithm, some in grouped(table, lambda line: line["algorithm"]).items():
        off = [line["against the smallest"] - 1 for line in some]
        said.append(
            f"- {algorithm}: between {min(off):+.1%} and {max(off):+.1%} over {len(off)} sizes."
        )
    return said


def draw(table: Table, out: Path) -> Sequence[Path]:
    drawn = figures.series(table, "algorithm", "ranks", "seconds a round")
    some = [line for line in table if line["algorithm"] == table[0]["algorithm"]]
    guide = {"compute alone": figures.points(some, "ranks", "compute alone")}
    panel = figures.Panel("seconds a round, real MPI", drawn, guides=guide)
    out.mkdir(parents=True, exist_ok=True)
    return figures.lines(out / "weak", [panel], "ranks", "s", log="x")
