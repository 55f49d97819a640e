"""What the literature promises on heterogeneous quadratics, seen from the schedules themselves."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_oldsgd import algorithms
from hpc_oldsgd.simulation.trajectory import trajectory
from support import paper_equations
from support.runs import simulated

STEPS = 1500


@functools.cache
def problem() -> paper_equations.Quadratics:
    return paper_equations.Quadratics(9, 5, seed=1)  # minimisers about 3 apart in every entry


def error(name: str, alpha: float, tau: int, **options: Any) -> float:
    """The worst agent's distance from the minimiser after STEPS gradients."""
    p = problem()
    algorithm = algorithms.get(name)(tau=tau, **options)
    with np.errstate(all="ignore"):
        run = trajectory(algorithm, "ring", p.x0, p.grad, alpha, STEPS // tau, batched=True)
        e = p.error(run.X[-1])
    return e if np.isfinite(e) else float("inf")


@pytest.mark.parametrize(
    ("name", "tau"), [("kgt", 1), ("kgt", 2), ("lugt", 1), ("lugt", 2), ("led", 1), ("led", 10)]
)
def test_corrected_methods_reach_the_exact_minimiser(name: str, tau: int) -> None:
    assert error(name, 0.05, tau) < 1e-9


@pytest.mark.parametrize("name", ["oldsgd", "ldsgd"])
def test_plain_ones_reach_a_neighbourhood_that_shrinks_with_alpha(name: str) -> None:
    tau = 5
    large, small = error(name, 0.04, tau), error(name, 0.01, tau)
    assert 0.1 < small < large / 2


def test_overlap_breaks_gradient_tracking_at_large_tau() -> None:
    assert error("olgt", 0.05, 1) < 1e-9
    assert error("lugt", 0.05, 5) < 1e-6
    assert error("olgt", 0.05, 5) > 1e6


def test_overlap_slows_the_agreement_of_led() -> None:
    assert error("led", 0.02, 5) < 1e-9
    assert error("oled", 0.02, 5) > 1e3 * error("led", 0.02, 5)


def test_led_needs_a_beta_that_falls_with_tau() -> None:
    assert error("led", 0.02, 5, beta=1.0) > 1e6
    assert error("led", 0.02, 5) < 1e-9


@pytest.mark.parametrize("name", ["lsgd", "cocod", "overlap_local_sgd", "co2"])
def test_averaging_methods_are_biased_under_heterogeneity(name: str) -> None:
    large, small = error(name, 0.04, 5), error(name, 0.02, 5)
    assert 1e-3 < small < large < 5


@pytest.mark.parametrize("words", ["--momentum 0.9 --alpha 0.01", "--optimizer adamw --alpha 0.01"])
@pytest.mark.parametrize("name", ["kgt", "lugt", "led", "xoldsgd"])
def test_corrections_go_with_any_optimizer(name: str, words: str, tmp_path: Path) -> None:
    """K-GT once fed its correction to the optimizer, where momentum or AdamW enlarges it."""
    ends = []
    for algorithm in (name, "ldsgd"):
        asked = f"--task logistic --agents 5 --partition label:0.95 --iterations 60 {words}"
        run = simulated(f"{asked} --algorithm {algorithm}", tmp_path / algorithm)
        ends.append(json.loads((run / "summary.json").read_text()))
    ours, ldsgd = ends
    assert ours["train_loss"] < 1.15 * ldsgd["train_loss"]
    assert ours["consensus"] < 1.15 * ldsgd["consensus"]
