"""python -m hpc_oldsgd.theory ring 9: what theory says about a graph."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from .. import cli, topology
from ..errors import UserError
from ..topology import Topology
from .bound import Problem, bound_terms, constants, step_size_limits
from .damping import correction_rounds, damping, gamma_limit, noise_growth, worst_radius
from .disagreement import disagreement
from .modes import LARGEST, Flights, modes


@dataclass(frozen=True)
class Options(Problem):
    """Print step sizes, a bound, how far agents are apart and xoldsgd's gamma for a graph."""

    topology: cli.Positional[str] = "ring"
    """The graph, as `python -m hpc_oldsgd.topology` takes it."""
    n: cli.Positional[int] = 9
    """Number of agents."""
    weights: str = "auto"
    """Mixing weights: auto, uniform, metropolis or lazy."""
    tau: int = 5
    """Local steps per round."""
    alpha: float | None = None
    """Step size for the bound; the largest allowed one without it."""
    T: int = 10_000
    """Iterations."""
    gap: float = 1.0
    """f^0 - f*: how far the first loss is above the smallest one."""
    fragments: int | None = None
    """Fragments of OLDSGD and xoldsgd, from 1 to tau; tau if not given."""
    gamma: float | None = None
    """xoldsgd's gamma; the one that suits the graph if not given."""
    json: bool = False
    """Print one line of JSON instead."""


def main(options: Options) -> None:
    graph = topology.from_name(options.topology, options.n, weights=options.weights)
    limits = step_size_limits(options, graph, options.tau)
    largest = min(limits.values())
    alpha = largest if options.alpha is None else options.alpha
    terms = bound_terms(options, graph, options.tau, alpha=alpha, T=options.T, gap=options.gap)
    C, D = constants(options, graph, options.tau)
    apart = _apart(options, graph)
    if options.json:
        report = {
            "topology": graph.name, "n": graph.n, "tau": options.tau,
            "lambda_2": graph.lambda_2, "p": graph.p, "C": C, "D": D,
            "limits": _finite(limits), "max_alpha": largest, "alpha": alpha,
            "terms": terms, "bound": sum(terms.values()), **apart,
        }  # fmt: skip
        print(json.dumps(report))
        return
    print(f"{graph.name}, n = {graph.n}, tau = {options.tau}")
    print(f"lambda_2 = {graph.lambda_2:.6g}, p = {graph.p:.6g}, C = {C:.6g}, D = {D:.6g}")
    if graph.period > 1:
        print(
            f"note: the theorem is for a static W; p is that of a period of {graph.period} rounds"
        )
    print("\nalpha is at most the least of")
    _table(limits)
    print(f"  {'largest alpha':<38} {largest:.6g}")
    print(
        f"\nmean squared gradient over T = {options.T} at alpha = {alpha:.6g}, at most the sum of"
    )
    _table(terms)
    print(f"  {'bound':<38} {sum(terms.values()):.6g}")
    if alpha > largest:
        print("note: alpha is above the rule, so the bound is not proved for it")
    _print_apart(options, graph, apart)


def _apart(options: Options, graph: Topology) -> dict[str, Any]:
    """The disagreement of four methods, over alpha^2, and xoldsgd's numbers; none without modes."""
    tau, gamma = options.tau, options.gamma
    fragments = tau if options.fragments is None else options.fragments
    flights = Flights.oldsgd(tau, fragments)
    if gamma is not None and not 0 <= gamma < 1:
        raise UserError(f"gamma must be at least 0 and below 1, not {gamma:g}.")
    if graph.period > 1 or graph.n > LARGEST:
        return {}
    suits, lam = damping(graph, tau, fragments), modes(graph)
    gamma = suits if gamma is None else gamma
    methods = {
        "ldsgd": (Flights.ldsgd(tau), 0.0),
        "oldsgd": (Flights.oldsgd(tau), 0.0),
        "fragments": (flights, 0.0),
        "xoldsgd": (flights, gamma),
    }
    sizes = {
        name: disagreement(graph, f, sigma=options.sigma, zeta=options.zeta, gamma=g)
        for name, (f, g) in methods.items()
    }
    xoldsgd = {
        "gamma": gamma,
        "suits": suits,
        "stable_below": gamma_limit(lam, flights),
        "round_leaves": worst_radius(lam, gamma, flights),
        "noise_growth": noise_growth(lam, gamma, flights),
        "correction_rounds": correction_rounds(lam, gamma, flights),
    }
    return {
        "fragments": fragments,
        "disagreement": {name: _finite(size._asdict()) for name, size in sizes.items()},
        "xoldsgd": _finite(xoldsgd),
    }


def _print_apart(options: Options, graph: Topology, apart: dict[str, Any]) -> None:
    if not apart:
        print(f"note: how far agents are apart is known for a static W of at most {LARGEST} agents")
        return
    P, found = apart["fragments"], apart["xoldsgd"]
    in_fragments = f"in {P} fragment{'s' * (P > 1)}"
    names = ("ldsgd", "oldsgd", f"oldsgd {in_fragments}", f"xoldsgd {in_fragments}")
    print(
        f"\n(1/n) sum_i E||x_i - xbar||^2 over alpha^2, without curvature, "
        f"sigma = {options.sigma:g}, zeta = {options.zeta:g}"
    )
    print(f"  {'':<38} {'round begins':<14}mean of its steps")
    for name, size in zip(names, apart["disagreement"].values(), strict=True):
        print(f"  {name:<38} {_number(size['boundary']):<14}{_number(size['mean'])}")
    print(f"\nxoldsgd {in_fragments}, gamma = {found['gamma']:g}")
    rows = {
        "gamma that suits this graph": found["suits"],
        "stable for gamma below": found["stable_below"],
        "a round leaves of the slowest mode": found["round_leaves"],
        "noise, times that of gamma = 0": found["noise_growth"],
        "rounds of drift until corrected": found["correction_rounds"],
    }
    for name, value in rows.items():
        print(f"  {name:<38} {_number(value)}")


def _number(value: float | None, infinite: str = "infinite") -> str:
    return infinite if value is None else f"{value:.6g}"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: None stands for it."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _table(terms: dict[str, float]) -> None:
    for name, value in _finite(terms).items():
        print(f"  {name:<38} {_number(value, 'no limit')}")
