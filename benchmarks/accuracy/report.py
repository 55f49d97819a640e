"""Seconds to the target, in a table and a figure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def reached(run: Run, target: float, grows: bool) -> float | None:
    """Seconds to the target, between the two points around it."""
    return crossing(run, "time", target, grows)


def crossing(run: Run, along: str, target: float, grows: bool) -> float | None:
    sign = 1 if grows else -1
    points = list(zip(run[along], run["value"], strict=True))
    for (t0, a0), (t1, a1) in itertools.pairwise(points):
        if sign * a1 >= sign * target:
            # From a start that is past the target, or no number, there is nothing between.
            share = (target - a0) / (a1 - a0) if a1 != a0 and math.isfinite(a0) else 1.0
            return float(t0 + (t1 - t0) * min(1.0, max(0.0, share)))
    return None


class Results:
    """The runs of one task by contestant, link and repeat; those that are missing are None."""

    def __init__(
        self, told: dict[str, Any], entries: Sequence[str], ratios: Sequence[float], repeats: int,
        find: Callable[[str, float, int], Run | None],
    ) -> None:  # fmt: skip
        self.told, self.entries, self.ratios = told, entries, ratios
        self.target, self.grows = told["target"], told["grows"]
        self.runs = {
            (e, r): [run for k in range(repeats) if (run := find(e, r, k)) is not None]
            for e in entries
            for r in ratios
        }

    def seconds(self, entry: str, ratio: float) -> list[float | None]:
        return [reached(run, self.target, self.grows) for run in self.runs[entry, ratio]]

    def guess(self, entry: str, ratio: float) -> float | None:
        """For one that was cut: the steps it took on another link times the seconds of a step here.

        What a contestant learns in a step is the same on every link, if tau is.
        """
        needed, step_s = [], []
        for run in self.runs[entry, ratio]:
            step_s.append(run["time"][-1] / run["iteration"][-1])
            for other in (o for r in self.ratios for o in self.runs[entry, r]):
                if (other["tau"], other["said"]) == (run["tau"], run["said"]):
                    needed.append(crossing(other, "iteration", self.target, self.grows))
        steps = [n for n in needed if n is not None]
        return mean(steps) * mean(step_s) if steps else None

    def time(self, entry: str, ratio: float) -> tuple[float, str, str] | None:
        """Seconds, the same as text, and what stands before them; None where nothing is known."""
        found, runs = self.seconds(entry, ratio), self.runs[entry, ratio]
        took = [s for s in found if s is not None]
        if found and len(took) == len(found):
            many = f" ({min(took):.1f} to {max(took):.1f})" if len(took) > 1 else ""
            return mean(took), f"{mean(took):.1f}{many}", ""
        if not runs:
            return None
        cut = f"not in {min(run['time'][-1] for run in runs):.0f}"
        if took:
            cut += f", {len(took)} of {len(found)} in {mean(took):.1f}"
        guess = self.guess(entry, ratio)
        if guess is None:
            return math.nan, cut, ""
        return guess, f"{cut}, about {guess:.0f}", "about "


def table(results: Results) -> str:
    first = results.entries[0]
    heads = [f"s, message {r:g} | times {first} | tau" for r in results.ratios]
    lines = [about(results.told), "", f"| | {' | '.join(heads)} |"]
    lines.append("| --- " * (1 + 3 * len(heads)) + "|")
    for entry in results.entries:
        cells = [shown(results, entry, first, ratio) for ratio in results.ratios]
        if any(results.runs[entry, ratio] for ratio in results.ratios):
            lines.append(f"| {entry} | {' | '.join(cells)} |")
    return "\n".join([*lines, *plans(results)])


def about(told: dict[str, Any]) -> str:
    links = ", ".join(told["networks"])
    how = f"{told['optimizer']}, alpha {told['alpha']:g}"
    if told["momentum"]:
        how += f", momentum {told['momentum']:g}"
    task = " ".join(filter(None, (told["task"], told["options"])))
    return (
        f"{task}, {told['ranks']} agents, {how}: seconds to a {told['primary']} of "
        f"{told['target']:g}; {told['bytes'] / 1e6:.2f} MB, gradient {1e3 * told['t_g']:.1f} ms, "
        f"links of {links}"
    )


def shown(results: Results, entry: str, first: str, ratio: float) -> str:
    """Three cells: seconds (least to most), how many times the first one's, and tau."""
    own, ours = results.time(entry, ratio), results.time(first, ratio)
    if own is None:
        return "- | - | -"
    seconds, text, before = own
    times = ""
    if entry != first and ours is not None and math.isfinite(seconds / ours[0]):
        times = f"{before}{seconds / ours[0]:.2f}"
    taus = sorted({run["tau"] for run in results.runs[entry, ratio]})
    return f"{text} | {times} | {' and '.join(map(str, taus))}"


def plans(results: Results) -> list[str]:
    """What those said who chose for themselves, and what it took before the clock started."""
    lines = []
    for (entry, ratio), runs in results.runs.items():
        for run in runs:
            if run["said"]:
                lines.append(
                    f"{entry}, message {ratio:g}, repeat {run['repeat']}: {run['said']} "
                    f"(measured in {run['before_s']:.1f} s, not counted)"
                )
    return ["", *lines] if lines else []


def figure(results: Results, stem: Path) -> None:
    """One panel a link: the first repeat of each."""
    from hpc_oldsgd.plot import style

    told = results.told
    with style.figure(stem, ("png",), height=2.9) as fig:
        axes = fig.subplots(1, len(results.ratios), squeeze=False, sharey=True)[0]
        for ax, ratio in zip(axes, results.ratios, strict=True):
            for k, entry in enumerate(results.entries):
                for run in results.runs[entry, ratio][:1]:
                    ax.plot(run["time"], run["value"], label=entry, **style.line(k))
            ax.axhline(results.target, color=style.GREY, linewidth=0.8)
            ax.set_title(f"a message takes {ratio:g} gradients")
            ax.set_xlabel("seconds")
        axes[0].set_ylabel(f"{told['primary'].replace('_', ' ')} of the mean model")
        if not results.grows:
            axes[0].set_yscale("log")
        lines = {line.get_label(): line for ax in axes for line in ax.get_lines()}
        known = {name: lines[name] for name in results.entries if name in lines}
        fig.legend(known.values(), known.keys(), loc="outside lower center", ncols=4)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
