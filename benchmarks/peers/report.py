"""A run as a Markdown table, several as a figure, and the goals beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Run = dict[str, Any]
GOAL_OVER_DDP = {1.0: 2.4, 5.0: 4.0}  # by how many gradients long a message is


def title(run: Run) -> str:
    s = run["settings"]
    load = {"sleep": "a gradient sleeps", "spin": "a gradient spins", "vgg11": "VGG11"}[s["load"]]
    network = f"network {s['network']}" if s["network"] else "the network that is there"
    return (
        f"{s['ranks']} ranks, {load} {s['t_g']:.3f} s, {s['bytes'] / 1e6:.1f} MB, "
        f"tau {s['tau']}, {network}, {s['mpi']}, gloo of torch {s['torch']}"
    )


def table(run: Run) -> str:
    ddp = find(run, "ddp")
    lines = [
        title(run),
        "",
        "| | graph | wire | s a step | least to most | ideal | ratio | DDP takes | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in run["results"]:
        times = f"{ddp['step_s'] / r['step_s']:.2f}x" if ddp else ""
        lines.append(
            f"| {r['entry']} | {r['graph']} | {r['wire']} | {r['step_s']:.3f} "
            f"| {r['step_min_s']:.3f} to {r['step_max_s']:.3f} | {r['ideal_s']:.3f} "
            f"| {r['ratio_to_ideal']:.3f} | {times} | {r['cpu_s']:.3f} |"
        )
    lines += [f"\nLeft out: {s['entry']} ({s['reason']})." for s in run["skipped"]]
    return "\n".join(lines)


def beside(runs: list[Run]) -> str:
    """Several runs of the same contestants in one table, a pair of columns each."""
    heads = [f"s a step, message {r['settings']['ratio']:g} t_g | ratio" for r in runs]
    lines = [f"| | graph | wire | {' | '.join(heads)} | CPU s |"]
    lines.append("| --- " * (4 + 2 * len(runs)) + "|")
    for r in runs[0]["results"]:
        rows = [find(run, r["entry"]) for run in runs]
        cells = [
            f"{one['step_s']:.3f} ({one['step_min_s']:.3f} to {one['step_max_s']:.3f}) "
            f"| {one['ratio_to_ideal']:.3f}"
            if one
            else "- | -"
            for one in rows
        ]
        cpu = ", ".join(f"{one['cpu_s']:.3f}" if one else "-" for one in rows)
        lines.append(f"| {r['entry']} | {r['graph']} | {r['wire']} | {' | '.join(cells)} | {cpu} |")
    return "\n".join(lines)


NOTES = (
    "Seconds a gradient step: medians, the slowest rank. Ideal: max(tau t_g, t_c) / tau of the "
    "entry's graph and wire, the ring's for all-reduces.\nCPU: processor seconds a step and rank "
    "beyond those of a step that sends nothing."
)


def find(run: Run, name: str) -> dict[str, Any] | None:
    return next((r for r in run["results"] if r["entry"] == name), None)


def goals(run: Run) -> list[str]:
    """What is promised of a run, each with the number measured."""
    ours, results = find(run, "oldsgd"), run["results"]
    lines: list[str] = []
    if ours is None:
        return lines
    lines.append(f"oldsgd is at {ours['ratio_to_ideal']:.3f} of its ideal (goal 1.03)")
    wanted = GOAL_OVER_DDP.get(run["settings"].get("ratio"))
    goal = f" (goal {wanted:g}x)" if wanted else ""
    for other in ("ddp", "ddp, gradient at once"):
        if r := find(run, other):
            lines.append(f"{r['step_s'] / ours['step_s']:.2f}x faster than {other}{goal}")
    rivals = [
        r
        for r in run["results"]
        if r["graph"] == ours["graph"] and not r["entry"].startswith("oldsgd")
    ]
    if rivals:
        best = min(rivals, key=lambda r: r["step_s"])
        lines.append(
            f"best other on the same graph: {best['entry']}, "
            f"{best['step_s'] / ours['step_s']:.3f} of oldsgd's time (goal: not under 1)"
        )
    for r in results:
        if r["entry"].startswith("oldsgd,") and ours["t_c"]:
            lines.append(
                f"{r['entry']}: t_c {r['t_c'] / ours['t_c']:.3f} of oldsgd's, step "
                f"{r['step_s'] / run['settings']['t_g']:.3f} of pure compute"
            )
    blocking = [r for r in results if r["blocking"]]
    both = find(run, "oldsgd, one peer, bf16")
    if blocking and both:
        best = min(blocking, key=lambda r: r["step_s"])
        lines.append(
            f"{both['entry']} is {best['step_s'] / both['step_s']:.2f}x faster than "
            f"{best['entry']}, the best blocking local method"
        )
    return lines


def figure(runs: list[Run], stem: Path) -> list[Path]:
    """One panel a run: seconds a step, least to most, and the ideal."""
    from hpc_oldsgd.plot import style

    names = list(dict.fromkeys(r["entry"] for run in runs for r in run["results"]))
    columns = min(2, len(runs))
    lines = -(-len(runs) // columns)
    height = lines * (0.155 * len(names) + 0.65)
    with style.figure(stem, ("png",), height=height, width=6.4) as fig:
        axes = fig.subplots(lines, columns, squeeze=False, sharey=True)
        for ax in axes.flat[len(runs) :]:
            ax.set_visible(False)
        for ax, run in zip(axes.flat, runs, strict=False):
            draw(ax, run, names, style)
        for row in axes:  # shared, but for the size of the letters
            row[0].set_yticks(range(len(names)), names, fontsize=7)
        axes[0][0].invert_yaxis()
        for ax in axes[-1]:
            ax.set_xlabel("seconds a gradient step; orange: ideal")
    return style.files(stem, ("png",))


def draw(ax: Any, run: Run, names: list[str], style: Any) -> None:
    for r in run["results"]:
        k = names.index(r["entry"])
        colour = style.PALETTE[0] if r["ours"] else style.GREY
        low, high = r["step_s"] - r["step_min_s"], r["step_max_s"] - r["step_s"]
        ax.barh(k, r["step_s"], color=colour, xerr=[[low], [high]], height=0.7,
                error_kw={"elinewidth": 0.8, "ecolor": style.INK})  # fmt: skip
        ax.plot([r["ideal_s"]] * 2, [k - 0.42, k + 0.42], color=style.PALETTE[1], linewidth=1.4)
        ax.text(r["step_max_s"], k, f" {r['step_s']:.2f}", va="center", fontsize=6.5)
    ax.set_xlim(0, 1.14 * max(r["step_max_s"] for r in run["results"]))
    s = run["settings"]
    link = f", message {s['ratio']:g} $t_g$" if s.get("ratio") else ""
    ax.set_title(f"n = {s['ranks']}, {s['load']} {s['t_g']:.2f} s{link}")
