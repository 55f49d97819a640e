"""python -m benchmarks.accuracy: the missing cells, then the table and the figure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path

from hpc_oldsgd import cli
from hpc_oldsgd.errors import UserError

from ..launch import launch, rate, slow_net_works
from .contestants import CONTESTANTS
from .options import Options
from .report import Results, figure, table
from .store import Store, limit_of

WORKER = "benchmarks.accuracy.worker"


def main(options: Options) -> None:
    if not slow_net_works():
        raise UserError("This needs a slow network of its own: root, tc and network namespaces.")
    with tempfile.TemporaryDirectory() as scratch:
        output = options.output or Path(scratch)
        folder = output.absolute() / f"accuracy-{options.task}"
        store = Store(folder, options.identity(), options.primary[1])
        asked = {k: v for k, v in vars(options).items() if k != "output"}
        (Path(scratch) / "asked.json").write_text(json.dumps(asked))
        given = ["--scratch", scratch, "--folder", folder]
        measure(options, store, given)
        results = collect(options, store)
        print(table(results))
        if options.output is not None:
            figure(results, folder)


def measure(options: Options, store: Store, given: list[object]) -> None:
    until = time.time() + options.seconds if options.seconds else math.inf
    link = store.link()
    if link is None:
        # How long a gradient takes beside the other ranks decides what a slow network is.
        link = launch(WORKER, given, options.ranks)
        store.write_link(link)
    for repeat, ratio in itertools.product(range(options.repeats), options.ratio):
        left = todo(options, store, ratio, repeat)
        if not left or time.time() > until:
            continue
        done, count = progress(options, store)
        print(f"{done} of {count} cells are done", file=sys.stderr, flush=True)
        words = [*given, "--ratio", ratio, "--repeat", repeat]
        if math.isfinite(until):
            words += ["--until", until]
        network = rate(link["bytes"], ratio * link["t_g"])
        launch(WORKER, words, options.ranks, network, burst(link["bytes"]))
    done, count = progress(options, store)
    if done < count:
        print(f"{done} of {count} cells are done: the same command goes on", file=sys.stderr)


def burst(nbytes: float) -> str:
    return "256kb" if nbytes > 4e6 else "16kb"


def present(options: Options) -> list[str]:
    return [e for e in options.entry if not CONTESTANTS[e].reason_to_skip(options.ranks)]


def todo(options: Options, store: Store, ratio: float, repeat: int) -> list[str]:
    o, first = options, options.entry[0]

    def finished(entry: str) -> bool:
        limit = limit_of(store, first, entry, ratio, repeat, o.limit, o.give_up)
        return store.finished(entry, ratio, repeat, limit)

    return [entry for entry in present(options) if not finished(entry)]


def progress(options: Options, store: Store) -> tuple[int, int]:
    cells = list(itertools.product(options.ratio, range(options.repeats)))
    count = len(cells) * len(present(options))
    return count - sum(len(todo(options, store, *cell)) for cell in cells), count


def collect(options: Options, store: Store) -> Results:
    link = store.link()
    assert link is not None
    name, grows = options.primary
    networks = [rate(link["bytes"], ratio * link["t_g"]) for ratio in options.ratio]
    told = {**dataclasses.asdict(options), **link, "primary": name, "grows": grows,
            "networks": networks}  # fmt: skip
    return Results(told, options.entry, options.ratio, options.repeats, store.run)


if __name__ == "__main__":
    cli.run(main, Options, prog="benchmarks.accuracy")
