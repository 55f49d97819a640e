"""What `bench overlap` prints."""

from __future__ import annotations

from typing import Any


def text(settings: dict[str, Any], results: list[dict[str, Any]]) -> str:
    s = settings
    engine = f"progress {s['progress']} ({s['engine']})"
    network = f", network {s['network']}" if s["network"] else ""
    lines = [
        f"{s['ranks']} ranks, {s['topology']}, {s['model_bytes'] / 1e6:g} MB, wire {s['wire']}, "
        f"{s['load']}, {s['mpi']}, {engine}{network}",
        f"alone: gradient t_g {s['t_g']:.4f} s, exchange t_c {s['t_c']:.4f} s",
        *_slowness(s, results),
        "",
        f"{'algorithm':<18}{'tau':>4}{'round':>10}{'ideal':>8}{'ratio':>8}"
        f"{'transfer':>10}{'exposed':>10}{'hidden':>8}{'rest':>9}{'cpu':>9}",
    ]
    for r in results:
        lines.append(
            f"{r['algorithm']:<18}{r['tau']:>4}{r['round_s']:>9.4f}s"
            f"{r['round_s'] / r['ratio_to_ideal']:>8.4f}{r['ratio_to_ideal']:>8.3f}"
            f"{r['transfer_s']:>10.4f}{r['exposed_s']:>10.4f}{r['hidden']:>8.3f}"
            f"{r['rest_s']:>9.4f}{r['cpu_s']:>9.4f}"
        )
    notes = (
        "seconds a round; rest: neither gradient nor wait, so mixing and Python; "
        "cpu: processor seconds of all threads outside the gradient"
    )
    return "\n".join([*lines, "", notes])


def _slowness(s: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """A line on what was made slow or left out, where anything was."""
    said = [f"slow {', '.join(s['slow'])}"] if s["slow"] else []
    said += [f"jitter {s['jitter']:g}"] if s["jitter"] else []
    if s["late"] == "reuse":
        out = ", ".join(f"{r['left_out']:.3f} ({r['algorithm']})" for r in results)
        said.append(
            f"late: reuse after {s['late_wait']:g} s, {s['staleness']} in a row; neighbours left "
            f"out a round: {out}"
        )
    if not said:
        return []
    return [
        f"{'; '.join(said)}; mean round " + ", ".join(f"{r['round_mean_s']:.4f} s" for r in results)
    ]
