"""The rule of --auto, --tau auto and --fragments auto, where times are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.algorithms import OLDSGD, XOLDSGD, Algorithm
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.training import choose as rule
from hpc_oldsgd.training.plan import Allowed, Bounds, Measured, Message, Plan

RING = topology.from_name("ring", 5)
FOUR = topology.from_name("ring", 4)
ROUND = {  # the paper's round times less tau: what is left to hide, as a function of tau, c and n
    "oldsgd": lambda tau, c, n: max(c - tau, 0),
    "oled": lambda tau, c, n: max(c - tau, 0),
    "kgt": lambda tau, c, n: max(c - tau, 0),
    "cocod": lambda tau, c, n: max(2 * (n - 1) / n * c - tau, 0),
    "overlap_local_sgd": lambda tau, c, n: max(2 * (n - 1) / n * c - tau, 0),
    "co2": lambda tau, c, n: max(2 * (n - 1) / n * c - tau, 0),
}


def tau_for(
    algorithm: Algorithm, c: float, bounds: Bounds = Bounds(), **more: Any  # noqa: B008
) -> Plan:  # fmt: skip
    """One graph and one wire: --tau auto."""
    n = RING.n
    measured = Measured(1.0, {"ring same": Message(c)}, 2 * (n - 1) / n * c)
    allowed = Allowed(("ring",), ("same",), bounds, 1)
    return rule.choose(algorithm, {"ring": RING}, measured, allowed, **{"margin": 1.0, **more})


def parts_for(message: Message, tau: int = 5, jitter: float = 0.0) -> int:
    """One graph, one wire and one tau: --fragments auto."""
    measured = Measured(1.0, {"ring same": message}, jitter=jitter)
    allowed = Allowed(("ring",), ("same",), Bounds(tau, tau))
    return rule.choose(OLDSGD(tau=tau), {"ring": FOUR}, measured, allowed).fragments


@pytest.mark.parametrize("name", ROUND)
def test_the_smallest_tau_that_hides(name: str) -> None:
    for c in (0.3, 1.0, 2.5, 7.0):
        expected = next(k for k in range(1, 99) if ROUND[name](k, c, RING.n) <= 1e-6)
        assert tau_for(algorithms.get(name)(), c).tau == expected, c


def test_tracking_sends_twice() -> None:
    """max(tau, 2c); the second message leaves after the first gradient."""
    for c in (0.4, 0.6, 2.0, 3.2):
        assert tau_for(algorithms.get("olgt")(), c).tau == max(1, math.ceil(2 * c)), c


def test_margin_and_bounds() -> None:
    made = tau_for(OLDSGD(), 5.0, margin=rule.MARGIN)
    assert made.tau == 6 and "5 gradients, 6 with a margin" in made.reason
    assert tau_for(OLDSGD(), 5.0, Bounds(8, 20)).tau == 8
    cut = tau_for(OLDSGD(), 50.0, Bounds(1, 20))
    assert cut.tau == 20 and "hides a part only" in cut.reason
    assert "waits for one more" in tau_for(algorithms.get("kgt")(), 2.0).reason
    alone = {"ring": topology.from_name("ring", 1)}
    one = rule.choose(OLDSGD(), alone, Measured(1.0, {"ring same": Message(9.0)}), Allowed())
    assert (one.tau, one.fragments) == (1, 1) and "one agent" in one.reason


def test_the_slowest_agent_sets_the_pace() -> None:
    assert tau_for(OLDSGD(), 6.0, speed=np.array([1.0, 1.0, 1 / 3, 1.0, 1.0])).tau == 2
    assert tau_for(OLDSGD(), 3.0, degree_aware=True).tau == 6


@pytest.mark.parametrize("name", ["ldsgd", "lugt", "led", "lsgd"])
def test_where_nothing_overlaps_there_is_nothing_to_choose(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} stands still"):
        rule.check_overlaps(algorithms.get(name)(), RING, Bounds())
    rule.check_overlaps(algorithms.get(name)(), RING, Bounds(5, 5))


def test_one_step_a_round_stays_one() -> None:
    with pytest.raises(UserError, match="tau must be 1"):
        rule.check_overlaps(algorithms.get("dsgd_cta")(), RING, Bounds())


def test_a_tau_in_use_is_kept_while_it_does() -> None:
    for tau, c, expected in [(6, 5.0, 6), (9, 5.0, 9), (10, 5.0, 6), (5, 5.0, 6), (3, 0.2, 1)]:
        assert rule.keep(OLDSGD(tau=tau), RING, c, Bounds())[0] == expected, (tau, c)


def test_c_of_what_a_round_sends() -> None:
    assert rule.c_of({"exchange"}, 4, 2.0, 4.0) == 2.0
    assert rule.c_of({"all_reduce"}, 4, 2.0, 4.0) == pytest.approx(4.0 / 1.5)
    assert rule.c_of(set(), 1, 2.0, 4.0) == 0.0
    assert rule.kinds(algorithms.get("co2")(), RING) == {"all_reduce"}
    assert rule.kinds(algorithms.get("kgt")(), RING) == {"exchange"}


def test_as_many_fragments_as_steps_where_all_is_even() -> None:
    for c in (0.0, 1.0, 5.0, 12.0):
        for tau in (1, 3, 5):
            assert parts_for(Message(c), tau) == tau


def test_fewer_where_gradients_differ() -> None:
    """The same draws for every P; a flight under more steps has more slack."""
    found = [parts_for(Message(3.35), jitter=jitter) for jitter in (0.02, 0.1, 0.3, 3.0)]
    assert found[0] == 5 and found == sorted(found, reverse=True) and found[-1] < 5


def test_fewer_where_a_message_has_a_cost_of_its_own() -> None:
    assert parts_for(Message(4.0, more=0.25)) == 5  # 4 + (P - 1) / 4, and tau = 5
    assert parts_for(Message(3.0, more=1.0)) == 2
    assert parts_for(Message(4.0, more=4.0)) == 1
    assert parts_for(Message(1.0, more_stall=0.05)) == 5
    assert parts_for(Message(1.0, more_stall=0.2)) == 2


def test_never_more_than_is_stable() -> None:
    graph, algorithm = topology.from_name("torus:4x4", 16), XOLDSGD(tau=8, gamma=0.9)
    measured = Measured(1.0, {"torus same": Message(1.0)})
    allowed = Allowed(("torus",), ("same",), Bounds(8, 8))
    most = rule.choose(algorithm, {"torus": graph}, measured, allowed).fragments
    XOLDSGD(tau=8, gamma=0.9, fragments=most).check(graph)
    assert 1 < most < 8


# -- graph and wire --------------------------------------------------------------------------------

GRAPHS = {name: topology.from_name(name, 4) for name in ("ring", "one-peer-exponential")}
BYTES = {"same": 1.0, "bf16": 0.5, "int8": 0.26, "int4": 0.133}


def planned(c: float, stall: float = 0.0, **allowed: Any) -> Plan:
    """One fp32 message takes c gradients; a ring sends two."""
    messages = {
        f"{graph} {wire}": Message(c * share * (2 if graph == "ring" else 1), stall=stall)
        for graph in GRAPHS
        for wire, share in BYTES.items()
    }
    return rule.choose(OLDSGD(), GRAPHS, Measured(1.0, messages), Allowed(**allowed))


def test_the_slower_the_link_the_narrower_the_wire_and_then_the_larger_tau() -> None:
    found = [planned(c) for c in (0.01, 0.6, 1.5, 5.0, 40.0, 200.0)]
    width = [list(BYTES).index(plan.wire) for plan in found]
    tau = [plan.tau for plan in found]
    assert width == sorted(width) and tau == sorted(tau)
    assert (found[0].wire, found[0].tau) == ("same", 1)
    assert (found[-1].wire, found[-1].tau) == ("int4", 32)
    assert all(plan.fragments == plan.tau for plan in found)  # no jitter: as fresh as can be


def test_with_equal_tau_the_graph_on_which_agents_are_closest() -> None:
    quick = planned(0.01)
    apart = {name: rule.Way(OLDSGD(), graph, 0.0).apart(1, 1) for name, graph in GRAPHS.items()}
    assert apart[quick.topology] == min(apart.values()) < max(apart.values())
    assert "apart by theory" in quick.reason and "1 with" in quick.reason


def test_what_nothing_hides_makes_tau_larger() -> None:
    taus = [planned(0.01, stall=stall).tau for stall in (0.0, 0.06, 0.2, 0.5)]
    assert taus == [1, 1, 3, 8]


def test_the_fastest_where_nothing_hides() -> None:
    made = planned(4000.0)
    assert (made.topology, made.wire, made.tau) == ("one-peer-exponential", "int4", 64)
    assert "hides a part only" in made.reason
