"""Runs that differ in the number of agents: speed-up, samples per second and what is lost of both.

Every agent keeps its batch, so samples per second show weak scaling. The time to one target shows
strong scaling.
"""

from __future__ import annotations

from pathlib import Path

from . import figures
from .tables import Record, Table, grouped, ratio, sooner

SHOWN = (
    "algorithm", "task", "partition", "topology", "agents", "tau", "fragments", "c", "alpha",
    "alpha_rule", "value", "step_s", "samples_per_s", "weak_efficiency", "hidden", "time_to_target",
    "training_to_target", "speedup", "strong_efficiency", "against", "clock",
)  # fmt: skip
SAME = ("algorithm", "task", "partition", "tau", "fragments", "c", "clock")
POWERS = {"fixed": 0.0, "linear": 1.0, "sqrt": 0.5}


def scaling(records: Table) -> Table:
    """Each run against the smallest of those that differ in the number of agents, and in alpha
    where it grows with them."""
    groups: list[Table] = []
    for same in grouped(records, lambda r: (family(r), *(r[k] for k in SAME))).values():
        # Where a number of agents ran with several step sizes, each rule by which they grow is a
        # line of its own.
        alphas = grouped(same, lambda r: r["agents"]).values()
        several = any(len({r["alpha"] for r in some}) > 1 for some in alphas)
        groups += by_rule(same) if several else [same]
    table: Table = []
    for group in groups:
        group = sorted(group, key=lambda r: r["agents"] or 0)
        if len({r["agents"] for r in group}) > 1:
            rule = next((name for name in POWERS if len(set(starts(group, name))) == 1), "mixed")
            table += [compared(group[0], line, rule) for line in group]
    return table


def compared(base: Record, line: Record, rule: str) -> Record:
    """A line of the table; efficiencies are shares of what as many agents could do at best."""
    n = base["agents"]
    more = line["agents"] / n if n and line["agents"] else None
    own = {**line, "alpha_rule": rule, "against": f"{n} agent{'s' * (n != 1)}"}
    own["speedup"] = sooner(base, line)
    own["strong_efficiency"] = ratio(own["speedup"], more)
    own["weak_efficiency"] = ratio(pace(line), pace(base))
    if line["clock"] == "simulated":  # what the simulator itself took says nothing of agents
        own["step_s"] = own["samples_per_s"] = None
    return {k: own[k] for k in SHOWN}


def pace(line: Record) -> float | None:
    """What one agent does in a unit of time: samples, or gradients when simulated."""
    if line["clock"] == "simulated":
        return ratio(line["iteration"], line["time"])
    return ratio(line["samples_per_s"], line["agents"])


def by_rule(records: Table) -> list[Table]:
    """Those of one alpha, of alpha / n, and of alpha / sqrt(n), where several n have it."""
    groups: list[Table] = []
    for rule in POWERS:
        pairs = zip(starts(records, rule), records, strict=True)
        for same in grouped(pairs, lambda pair: pair[0]).values():
            groups.append([r for _, r in same])
    return [group for group in groups if len({r["agents"] for r in group}) > 1]


def starts(records: Table, rule: str) -> list[str]:
    """The step size of one agent that the rule makes each run's step size from."""
    power = POWERS[rule]
    return [f"{(r['alpha'] or 0.0) / (r['agents'] or 1) ** power:.6g}" for r in records]


def family(record: Record) -> str:
    """torus:2x4 and torus:4x4 are one graph of two sizes."""
    return str(record["topology"]).split(":")[0]


def draw(table: Table, out: Path) -> list[Path]:
    """Speed-up and samples per second against the number of agents; a figure for each task."""
    drawn: list[Path] = []
    for key, same in grouped(table, lambda r: (r["task"], r["partition"], r["clock"])).items():
        told = ("algorithm", "graph", "tau", "c", "alpha_rule")
        lines = [{**line, "graph": family(line)} for line in same]
        differ = [k for k in told if len({line[k] for line in lines}) > 1] or ["algorithm"]
        for line in lines:
            names = {"alpha_rule": "alpha {}", "tau": "tau = {}", "c": "c = {}"}
            line["label"] = ", ".join(names.get(k, "{}").format(line[k]) for k in differ)
        panels = [
            panel(lines, title, column)
            for title, column in (("speed-up to the target", "speedup"),
                                  ("samples per second", "samples_per_s"))
            if any(line[column] is not None for line in lines)
        ]  # fmt: skip
        stem = "-".join(["scaling", *(str(k).replace(":", "").replace("/", "_") for k in key)])
        if panels:
            drawn += figures.lines(out / stem, panels, "agents", "", log="xy", share_y=False)
    return drawn


def panel(lines: Table, title: str, column: str) -> figures.Panel:
    """With a grey line for n times as much as the smallest run had."""
    base = next(line for line in lines if line[column] is not None)
    sizes = sorted({line["agents"] for line in lines})
    best = [base[column] * n / base["agents"] for n in sizes]
    drawn = figures.series(lines, "label", "agents", column)
    return figures.Panel(title, drawn, guides={"n times": (sizes, best)})
