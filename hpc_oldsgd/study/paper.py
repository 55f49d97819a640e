"""What the paper reports (Zhou and Pu, 2025), to stand beside our numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ..runs.reader import Run
from .cells import Cell

MODELS = ("VGG11", "ResNet18", "GPT-2")
MODEL_OF = {"cifar10-vgg11": "VGG11", "cifar10-resnet18": "ResNet18", "wikitext2-gpt2": "GPT-2"}

# Tables 2 and 3: how much sooner OLDSGD is at the target, (c = 1, c = 5), each at its best tau.
SPEEDUP: dict[tuple[str, str, str], tuple[float, float]] = {
    ("iid", "ldsgd", "VGG11"): (1.23, 1.26),
    ("iid", "ldsgd", "ResNet18"): (1.50, 1.62),
    ("iid", "ldsgd", "GPT-2"): (1.95, 2.65),
    ("iid", "kgt", "VGG11"): (1.26, 1.30),
    ("iid", "kgt", "ResNet18"): (1.42, 1.73),
    ("iid", "kgt", "GPT-2"): (1.86, 2.54),
    ("iid", "lsgd", "VGG11"): (1.34, 1.64),
    ("iid", "lsgd", "ResNet18"): (1.84, 2.18),
    ("iid", "lsgd", "GPT-2"): (2.08, 3.32),
    ("iid", "lugt", "VGG11"): (2.68, 3.53),
    ("iid", "lugt", "ResNet18"): (1.98, 4.62),
    ("label:0.7", "ldsgd", "VGG11"): (1.41, 1.56),
    ("label:0.7", "ldsgd", "ResNet18"): (1.54, 1.71),
    ("label:0.7", "kgt", "VGG11"): (1.34, 2.25),
    ("label:0.7", "kgt", "ResNet18"): (2.63, 2.25),
    ("label:0.7", "lugt", "VGG11"): (2.14, 6.20),
    ("label:0.7", "lugt", "ResNet18"): (3.41, 7.43),
}
# Sooner at the target with 16 agents than with one; ring, tau = 5.
SCALING_AGENTS = 16
SCALING = {"VGG11": 14.0, "ResNet18": 13.0}
TAUS = (1, 3, 5, 10, 15, 20, 30, 40)
SETUP = {
    "agents": {"VGG11": 9, "ResNet18": 9, "GPT-2": 8},
    "batch": {"VGG11": 8, "ResNet18": 8, "GPT-2": 2},
}
ALPHA = 0.01


def speedup(partition: str, algorithm: str, model: str, c: float) -> float | None:
    pair = SPEEDUP.get((partition, algorithm, model))
    return None if pair is None or c not in (1.0, 5.0) else pair[0 if c == 1.0 else 1]


def nearest(task: str) -> str:
    """The model of the paper that a task is compared with."""
    return MODEL_OF.get(task, "VGG11")


def differences(
    cells: Sequence[Cell], taus: tuple[int, ...], seeds: int, runs: list[Run]
) -> list[str]:
    """What is not as in the paper, a sentence each."""
    cell = cells[0]
    model, task = nearest(cell.task.name), cell.task
    said = []
    if task.name not in MODEL_OF:
        said.append(
            f"task: {task.name}, a small model on 1,438 training images of 8x8 pixels, where the "
            f"paper trains {model} on CIFAR-10"
            if task.name in ("digits", "logistic")
            else f"task: {task.name}, where the paper trains {model}"
        )
    if getattr(task, "batchnorm", False):
        said.append("the model has BatchNorm layers")
    for name, ours in (("agents", cell.n), ("batch", task.batch)):
        if ours != SETUP[name][model] and (name, ours) != ("agents", 1):  # where scaling starts
            said.append(f"{name}: {ours}, the paper's {SETUP[name][model]}")
    if cell.alpha != ALPHA:
        said.append(f"step size: {cell.alpha:g}, the paper's {ALPHA:g}")
    if taus and not set(taus) >= set(TAUS):
        said.append(
            f"tau: only {', '.join(map(str, taus))}, where the paper takes each algorithm's best "
            f"of {', '.join(map(str, TAUS))}"
        )
    if cell.options.target is not None:
        what = task.primary[0].replace("_", " ")
        said.append(f"target: {cell.options.target:g} {what}; the paper's own is not known to us")
    said.append(measured(cells))
    longest = max((run.rows[-1]["iteration"] for run in runs if run.rows), default=0)
    said.append(f"length: the longest run took {longest:,} iterations; {seeds} seed(s)")
    return said


def measured(cells: Sequence[Cell]) -> str:
    """How often and on what: no time to a target is finer."""
    gaps = sorted({cell.options.eval_every * cell.tau for cell in cells})
    rounds = sorted({cell.options.eval_every for cell in cells})
    often = [f"{some[0]}" + (f" to {some[-1]}" if some[1:] else "") for some in (gaps, rounds)]
    plural, config = "" if often[1] == "1" else "s", cells[0].options
    told = (
        f"measured: every {often[0]} iterations ({often[1]} round{plural}), on at most "
        f"{config.eval_samples:,} test samples"
    )
    return told + ("" if config.target is None else "; a time to the target is good to that")
