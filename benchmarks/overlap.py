"""The overlap on a slow network: python -m benchmarks.overlap (root, or user namespaces).

A ring of 4 ranks, 40 MB, tau = 5, t_g = 0.2 s, on links where the whole exchange takes 0.2, 1 and
2 times tau t_g; first with MPICH, then with Open MPI. Prints a Markdown table, then JSON.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_oldsgd import cli
from hpc_oldsgd.errors import UserError

from .launch import every_mpirun, launch, rate

MESSAGES = 2  # a ring sends to two neighbours


@dataclass(frozen=True)
class Options:
    """Measure the overlap of the algorithms on slow networks of known rates."""

    algorithm: tuple[str, ...] = ("oldsgd", "ldsgd", "lsgd", "dsgd_cta")
    """Algorithms to compare."""
    ratio: tuple[float, ...] = (0.2, 1.0, 2.0)
    """How many times tau t_g the exchange of two messages takes."""
    mpirun: tuple[str, ...] = ()
    """The MPIs, by their mpirun; else those of the virtual environment, or the one in PATH."""
    ranks: int = 4
    """Ranks in the ring, at least 3."""
    model_bytes: int = 40_000_000
    """Bytes of one message."""
    tau: int = 5
    """Local steps a round."""
    fragments: tuple[int, ...] = (1, 5)
    """Fragments in which oldsgd and xoldsgd send x: each is measured."""
    grad_seconds: float = 0.2
    """Seconds a gradient takes."""
    rounds: int = 10
    """Measured rounds in a run."""
    repeat: int = 1
    """Runs of each; medians are shown, with the smallest and the largest ratio."""
    extra: str = ""
    """More options for `bench overlap`, in one word: --extra="--load spin --progress poll"."""
    output: Path | None = None
    """Write the JSON there as well."""

    def __post_init__(self) -> None:
        if self.ranks < 3:
            raise UserError("A ring whose ranks have two neighbours needs --ranks 3 or more.")


def main(options: Options) -> None:
    measured = []
    for mpirun in options.mpirun or every_mpirun():
        for ratio in options.ratio:
            for _ in range(options.repeat):
                measured.append({"t_c_ratio": ratio, **run(options, mpirun, ratio)})
    print(table(measured))
    text = json.dumps({"runs": measured})
    if options.output is not None:
        options.output.write_text(text + "\n")
    print(text)


def run(options: Options, mpirun: str, ratio: float) -> dict[str, Any]:
    """One `bench overlap` on a network of its own: its JSON."""
    t_c = ratio * options.tau * options.grad_seconds
    words: list[object] = ["overlap", "--json"]
    for name in ("model_bytes", "tau", "grad_seconds", "rounds"):
        words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    words += ["--algorithm", *options.algorithm, "--fragments", *options.fragments]
    words += options.extra.split()
    network = rate(MESSAGES * options.model_bytes, t_c)
    return launch("hpc_oldsgd.bench", words, options.ranks, network, by=mpirun)


def table(measured: list[dict[str, Any]]) -> str:
    """One line for each MPI, rate and algorithm; medians over the repeated runs."""
    cells: dict[tuple[str, float, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for one in measured:
        for result in one["results"]:
            key = (one["settings"]["mpi"], one["t_c_ratio"], result["algorithm"])
            cells.setdefault(key, []).append((result, one["settings"]))
    lines = [
        "| MPI | t_c / (tau t_g) | algorithm | tau | t_c, s | round, s | ratio to ideal "
        "| exposed, s | hidden | ldsgd takes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (mpi, t_c_ratio, algorithm), runs in cells.items():

        def median(name: str, runs: Any = runs) -> float:
            return float(statistics.median(result[name] for result, _ in runs))

        ratios = [result["ratio_to_ideal"] for result, _ in runs]
        spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
        t_c = statistics.median(settings["t_c"] for _, settings in runs)
        blocking = cells.get((mpi, t_c_ratio, "ldsgd"))
        times = ""
        if blocking is not None and runs[0][0]["tau"] == blocking[0][0]["tau"]:
            slow = statistics.median(result["round_s"] for result, _ in blocking)
            times = f"{slow / median('round_s'):.2f}x"
        lines.append(
            f"| {mpi} | {t_c_ratio:g} | {algorithm} | {runs[0][0]['tau']} | {t_c:.3f} "
            f"| {median('round_s'):.3f} | {median('ratio_to_ideal'):.3f}{spread} "
            f"| {median('exposed_s'):.3f} | {median('hidden'):.3f} | {times} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.overlap")
