"""python -m hpc_oldsgd.topology ring 9: what a graph costs and how fast it mixes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .. import cli, topology
from . import NAMES, Topology, plot


@dataclass(frozen=True)
class Options:
    """Print degree, lambda_2, p and edges of a graph of agents."""

    topology: cli.Positional[str]
    """The graph: a name (with torus:2x4, erdos-renyi:0.3), or file:PATH (a matrix or edges)."""
    n: cli.Positional[int]
    """Number of agents."""
    weights: str = "auto"
    """auto (uniform where degrees are equal, else metropolis), uniform, metropolis or lazy."""
    rows: int | None = None
    """Rows of a torus or grid."""
    cols: int | None = None
    """Columns of a torus or grid."""
    probability: float | None = None
    """Edge probability of erdos-renyi; 2 ln n / n without it."""
    seed: int | None = None
    """Seed of erdos-renyi; 0 without it."""
    plot: Path | None = None
    """Draw the graph into this file (.png, .pdf or .svg)."""
    json: bool = False
    """Print one line of JSON, with all edges and weights of the first period."""


def main(options: Options) -> None:
    shape = {k: getattr(options, k) for k in ("weights", "rows", "cols", "probability", "seed")}
    graph = topology.from_name(options.topology, options.n, **shape)
    print(json.dumps(_report(graph)) if options.json else _text(graph))
    if options.plot is not None:
        plot.save(graph, options.plot)


def _report(graph: Topology) -> dict[str, object]:
    rounds = [graph.edges(r) for r in range(graph.period)]
    return {
        "topology": graph.name,
        "n": graph.n,
        "period": graph.period,
        "degree": graph.degree,
        "lambda_2": graph.lambda_2,
        "p": graph.p,
        "edges": rounds,
        "messages_per_round": [2 * len(edges) for edges in rounds],
        "neighbours": [
            [dict(graph.neighbours(i, r)) for i in range(graph.n)] for r in range(graph.period)
        ],
        "self_weights": [graph.self_weights(r).tolist() for r in range(graph.period)],
    }


def _text(graph: Topology) -> str:
    rounds = [graph.edges(r) for r in range(graph.period)]
    counts = [len(edges) for edges in rounds]
    varying = graph.period > 1
    lines = [
        f"topology            {graph.name}, n = {graph.n}",
        *([f"period              {graph.period} rounds"] if varying else []),
        f"degree              {graph.degree}"
        + (" (most messages an agent sends)" if graph.n > 1 else ""),
        f"lambda_2            {graph.lambda_2:.10g}" + (" (of a period)" if varying else ""),
        f"p = 1 - lambda_2^2  {graph.p:.10g}" + (" (of a period)" if varying else ""),
        f"edges               {_each(counts)}",
        f"messages per round  {_each([2 * count for count in counts])}",
    ]
    for r, edges in enumerate(rounds[:8]):
        shown = "  ".join(f"{i}-{j}" for i, j in edges[:24])
        more = f"  ... {len(edges) - 24} more" if len(edges) > 24 else ""
        lines.append((f"round {r}:  " if varying else "") + shown + more)
    return "\n".join(line for line in lines if line)


def _each(counts: list[int]) -> str:
    """One number where all rounds agree, else one per round."""
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


if __name__ == "__main__":
    cli.run(
        main,
        Options,
        prog="hpc_oldsgd.topology",
        description=f"Degree, lambda_2, p and edges of a graph of agents: {', '.join(NAMES)}.",
    )
