"""Plans that are tried: what --auto does where messages are slower under gradients than alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import OLDSGD
from hpc_oldsgd.training import choose as rule
from hpc_oldsgd.training import measure, trial
from hpc_oldsgd.training.plan import Allowed, Bounds, Measured, Message, Plan

NAMES = ("ring", "exponential", "one-peer-exponential")
GRAPHS = {name: topology.from_name(name, 4) for name in NAMES}
SENDS = {"ring": 2, "exponential": 3, "one-peer-exponential": 1}
SHARE = {"same": 1.0, "bf16": 0.5, "int8": 0.26, "int4": 0.133}
GRADIENT = 0.02


def alone(c: float, graphs: tuple[str, ...] = NAMES) -> Measured:
    """An fp32 message takes c gradients, alone."""
    messages = {
        f"{graph} {wire}": Message(GRADIENT * c * share * SENDS[graph])
        for graph in graphs
        for wire, share in SHARE.items()
    }
    return Measured(GRADIENT, messages)


def machine(c: float, slower: float) -> Callable[[Plan], float]:
    """A step on a machine on which each flight takes `slower` gradients more than alone."""

    def step(plan: Plan) -> float:
        flight = c * SHARE[plan.wire] * SENDS[plan.topology] / plan.fragments + slower
        return GRADIENT * max(1.0, flight * plan.fragments / plan.tau)

    return step


def settled(
    c: float, slower: float, allowed: Allowed = Allowed()  # noqa: B008
) -> tuple[Plan, Measured]:  # fmt: skip
    return trial.settle(OLDSGD(), GRAPHS, alone(c, allowed.graphs), allowed, machine(c, slower))


def test_what_holds_is_tried_once_and_kept() -> None:
    plan, seen = settled(0.2, 0.0)
    assert plan == rule.choose(OLDSGD(), GRAPHS, alone(0.2), Allowed())
    (one,) = seen.tried
    assert one.is_of(plan) and one.step == GRADIENT and one.longer == pytest.approx(1.0)


@pytest.mark.parametrize("c", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("slower", [0.3, 0.6, 0.95])
def test_messages_that_are_slower_under_gradients_are_hidden_still(c: float, slower: float) -> None:
    """With the least tau of all plans that hide on this machine, though it was measured idle."""
    plan, seen = settled(c, slower)
    took = machine(c, slower)
    assert took(plan) <= rule.HOLDS * GRADIENT
    every = [Plan(g, w, tau, 1) for g in GRAPHS for w in SHARE for tau in range(1, 65)]
    least = min(one.tau for one in every if took(one) <= rule.HOLDS * GRADIENT)
    assert least <= plan.tau <= least + 1  # the margin
    assert len(seen.tried) <= 1 + 2 * rule.TRIALS_OF_TAU
    assert [one.step for one in seen.tried if one.is_of(plan)] == [took(plan)]


def test_more_fragments_than_the_machine_takes() -> None:
    """A flight has a cost under gradients that it has not alone: fewer and longer ones."""
    plan, seen = settled(5.0, 1.2, Allowed(tau=Bounds(6, 6)))
    assert (seen.tried[0].fragments, plan.fragments) == (6, 3)
    assert machine(5.0, 1.2)(plan) == GRADIENT


def test_a_failed_trial_counts_for_all_wires_of_its_graph() -> None:
    """What no wire makes shorter, seen once, is expected of the others: they are not tried."""
    plan, seen = settled(0.2, 1.5, Allowed(("ring",)))
    assert [(one.wire, one.tau, one.fragments) for one in seen.tried] == [
        ("same", 1, 1), ("same", 2, 1)]  # fmt: skip
    assert plan.tau == 2


def test_the_fastest_where_nothing_does_what_it_should() -> None:
    def step(plan: Plan) -> float:
        return GRADIENT * (2.0 if plan.topology == "ring" else 3.0)

    allowed = Allowed(tau=Bounds(1, 1))
    plan, seen = trial.settle(OLDSGD(), GRAPHS, alone(0.01), allowed, step)
    assert (plan.topology, plan.tau) == ("ring", 1) and len(seen.tried) == len(GRAPHS)
    assert all(one.longer > rule.HOLDS for one in seen.tried)


def test_gradients_that_differ_make_no_trial_fail() -> None:
    """Neighbours wait for a late one at any tau; the virtual clock says for how long."""
    measured = Measured(GRADIENT, {"ring same": Message(0.001)}, jitter=0.6)
    allowed = Allowed(("ring",), ("same",))
    ring = {"ring": GRAPHS["ring"]}
    plan = rule.choose(OLDSGD(), ring, measured, allowed)
    waits = rule.expected(OLDSGD(), ring["ring"], measured, plan)
    assert plan.tau == 1 and waits > rule.WORTH * GRADIENT
    _, seen = trial.settle(OLDSGD(), ring, measured, allowed, lambda plan: 1.04 * waits)
    assert len(seen.tried) == 1


def test_what_an_algorithm_waits_for_at_any_tau_is_no_failure() -> None:
    kgt, ring = algorithms.get("kgt")(), {"ring": GRAPHS["ring"]}
    measured = Measured(GRADIENT, {"ring same": Message(2 * GRADIENT)})
    plan = rule.choose(kgt, ring, measured, Allowed(("ring",), ("same",), fragments=1))
    assert rule.expected(kgt, ring["ring"], measured, plan) == pytest.approx(
        GRADIENT * (plan.tau + 2) / plan.tau
    )


def test_no_trial_that_would_take_too_long() -> None:
    def never(plan: Plan) -> float:
        raise AssertionError(plan)

    slow = Measured(9.0, {"ring same": Message(1.0)})
    ring = {"ring": GRAPHS["ring"]}
    plan, seen = trial.settle(OLDSGD(), ring, slow, Allowed(("ring",), ("same",)), never)
    assert plan.tau == 1 and not seen.tried
    one = {"ring": topology.from_name("ring", 1)}
    assert not trial.settle(OLDSGD(), one, alone(0.2), Allowed(), never)[1].tried


def test_no_guess_where_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that took long on a busy machine makes nobody jump to the largest tau."""
    now = iter(range(0, 1000, 6))
    monkeypatch.setattr(trial.time, "perf_counter", lambda: float(next(now)))
    ring = {"ring": GRAPHS["ring"]}
    measured, allowed = alone(0.2, ("ring",)), Allowed(("ring",))
    plan, seen = trial.settle(OLDSGD(), ring, measured, allowed, lambda plan: 50 * GRADIENT)
    assert len(seen.tried) == 1 and seen.tried[0].is_of(plan) and plan.tau == 1


def test_whole_periods_are_timed() -> None:
    graph = topology.from_name("one-peer-exponential", 8)
    assert graph.period == 3
    for tau, rounds in [(1, (6, 30)), (4, (3, 9)), (64, (3, 3))]:
        assert trial.rounds_of(Plan(graph.name, "same", tau, 1), graph, GRADIENT) == rounds
    assert trial.rounds_of(Plan("ring", "same", 1, 1), GRAPHS["ring"], GRADIENT) == (4, 30)


@pytest.mark.parametrize(
    ("gradient", "steps"),
    [(1.0, 30), (0.01, 30), (0.003, 100), (0.002, 150), (1e-6, 200), (0, 200)],
)
def test_short_steps_are_timed_for_longer(gradient: float, steps: int) -> None:
    """30 steps of 2 ms are over before the ranks that share a core have had it in turns."""
    for tau in (1, 7):
        timed = trial.rounds_of(Plan("ring", "same", tau, 1), GRAPHS["ring"], gradient)[1]
        assert (timed - 1) * tau < steps <= timed * tau


def test_one_hiccup_is_no_sign_and_two_are() -> None:
    assert trial.without_longest([1.0, 9.0, 1.0]) == [1.0, 1.0]
    assert trial.without_longest([9.0, 1.0, 9.0]) == [1.0, 9.0]
    assert trial.without_longest([2.0]) == [2.0]


def test_the_line_says_what_was_tried() -> None:
    plan, seen = settled(0.2, 0.95)
    said = measure.with_seconds(plan, seen).reason
    assert f"tried, a step takes {1e3 * seen.tried[0].step:.3g} ms with exponential same" in said
    assert "under gradients; " in said
    assert said.endswith(f"tau = {plan.tau}, P = {plan.fragments}") and "\n" not in said


def test_polled_from_inside_the_backward_pass() -> None:
    polls: list[int] = []
    transport: Any = type("T", (), {"progress": "poll", "poll": lambda self: polls.append(1)})()
    model = nn.Linear(2, 2)
    compute = trial.Compute(model, lambda k: model(torch.ones(1, 2)).sum().backward(), 11)
    with compute.polled(transport):
        compute.gradient(0)
    assert len(polls) == 2
    compute.gradient(0)
    assert len(polls) == 2
