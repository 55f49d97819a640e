"""python -m benchmarks.peers: the comparison on slow networks that it makes itself (root)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_oldsgd import cli

from ..launch import launch, rate, slow_net_works
from . import report


@dataclass(frozen=True)
class Options:
    """Ours beside DDP, no_sync, post-local SGD and others, on links of known speed."""

    ranks: tuple[int, ...] = (4,)
    """Numbers of ranks."""
    load: tuple[Literal["sleep", "spin", "vgg11"], ...] = ("sleep",)
    """The gradient: sleep, spin or vgg11."""
    ratio: tuple[float, ...] = (1.0, 5.0)
    """How many gradients long one message is on the link."""
    network: Literal["auto", "slow", "here"] = "auto"
    """slow: links of our own (root); here: whatever joins the ranks; auto: slow where possible."""
    grad_seconds: float = 0.2
    """How long an emulated gradient takes."""
    model_bytes: int = 40_000_000
    """Size of an emulated model."""
    tau: int = 5
    """Local steps a round."""
    rounds: int = 5
    """Measured rounds of each contestant."""
    only: tuple[str, ...] = ()
    """Contestants whose names start with one of these."""
    output: Path | None = None
    """Folder for peers.json and peers.png."""


def main(options: Options) -> None:
    slow = options.network == "slow" or (options.network == "auto" and slow_net_works())
    if not slow and options.network == "auto":
        print("No slow network here (it needs root, tc and namespaces): the one that is there.\n")
    runs = []
    for load in options.load:
        for n in options.ranks:
            same = []
            for ratio in options.ratio if slow else (0.0,):
                same.append(one(options, load, n, ratio))
                same[-1]["settings"]["ratio"] = ratio
                print(report.table(same[-1]), *report.goals(same[-1]), "", sep="\n", flush=True)
            if len(same) > 1:
                print(f"{n} ranks, {load}:\n", report.beside(same), "", sep="\n", flush=True)
            runs += same
    print(report.NOTES)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "peers.json").write_text(json.dumps({"runs": runs}) + "\n")
        report.figure(runs, options.output / "peers")


def one(options: Options, load: str, n: int, ratio: float) -> dict[str, Any]:
    common = ["--load", load, "--tau", options.tau, "--json"]
    common += ["--grad-seconds", options.grad_seconds, "--model-bytes", options.model_bytes]
    arguments = [*common, "--rounds", options.rounds]
    if options.only:
        arguments += ["--only", *options.only]
    if not ratio:
        return launch("benchmarks.peers.worker", arguments, n)
    t_g, nbytes = options.grad_seconds, options.model_bytes
    if load == "vgg11":  # how long its gradient takes must be measured first
        few = ["--rounds", 2, "--only", "ldsgd", "--no-exchange-alone"]
        first = launch("benchmarks.peers.worker", [*common, *few], n)
        t_g, nbytes = first["settings"]["t_g"], first["settings"]["bytes"]
    return launch("benchmarks.peers.worker", arguments, n, rate(nbytes, ratio * t_g))


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.peers")
