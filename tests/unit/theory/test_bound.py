"""The rule and the bound against a transcription in exact fractions; the command."""

import json
import math
import subprocess
import sys
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd import theory
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.theory import Flights, Problem
from hpc_oldsgd.topology import from_name

RING = from_name("ring", 9)
numbers = st.fractions(F(1, 100), 100, max_denominator=100)


def transcription(L, sigma, zeta, M, P, n, p, tau, alpha, T, gap):
    """Squares of the limits (so that roots stay exact), C, D and the bound's terms, as printed."""
    C = 12 * (2 * tau + M) * n * (P + 1) / p
    D = 6 * ((2 * tau + M) * n * zeta**2 + n * sigma**2) / p
    limits_squared = [
        (1 / L) ** 2,
        (n / (4 * L * M * (P + 1))) ** 2,
        (n / (L * M)) ** 2,
        p**2 / (256 * L**2 * 3 * tau * (2 * tau + M)),
        p * n / (2 * C * tau) / (32 * L) ** 2,
    ]
    terms = [
        8 * gap / (alpha * T),
        8 * alpha * L / n * (sigma**2 / 2 + M * zeta**2),
        1024 * L**2 / n * D * tau / p * alpha**2,
    ]
    return C, D, limits_squared, terms


@settings(max_examples=60, deadline=None)
@given(
    **dict.fromkeys(("L", "sigma", "zeta", "M", "P", "alpha", "gap"), numbers),
    tau=st.integers(1, 50),
    T=st.integers(1, 10**6),
    graph=st.sampled_from([RING, from_name("torus", 12), from_name("complete", 5)]),
)
def test_against_transcription(L, sigma, zeta, M, P, alpha, gap, tau, T, graph):
    n, p = F(graph.n), F(graph.p)
    C, D, limits_squared, terms = transcription(
        L, sigma, zeta, M, P, n, p, F(tau), alpha, F(T), gap
    )
    problem = Problem(*map(float, (L, sigma, zeta, M, P)))
    assert theory.constants(problem, graph, tau) == pytest.approx((float(C), float(D)), rel=1e-12)
    limits = [math.sqrt(square) for square in limits_squared]
    ours = theory.step_size_limits(problem, graph, tau)
    assert list(ours.values()) == pytest.approx(limits, rel=1e-12)
    assert theory.max_step_size(problem, graph, tau) == pytest.approx(min(limits), rel=1e-12)
    rest = {"alpha": float(alpha), "T": T, "gap": float(gap)}
    got = theory.bound_terms(problem, graph, tau, **rest)
    assert list(got.values()) == pytest.approx([float(t) for t in terms], rel=1e-12)
    assert theory.bound(problem, graph, tau, **rest) == pytest.approx(float(sum(terms)), rel=1e-12)


def test_by_hand():
    """Complete graph (p = 1), n = 2, tau = 1, all constants 1: C = 12*3*2*2, D = 6*(3*2 + 2)."""
    problem, graph = Problem(1, 1, 1, 1, 1), from_name("complete", 2)
    assert theory.constants(problem, graph, 1) == (144, 48)
    assert list(theory.step_size_limits(problem, graph, 1).values()) == pytest.approx(
        [1, 1 / 4, 2, 1 / 48, math.sqrt(2 / 288) / 32]
    )
    assert theory.bound(problem, graph, 1, alpha=0.5, T=4, gap=1) == pytest.approx(
        4 + 2 * 1.5 + 512 * 48 / 4
    )


def test_without_growth_two_limits_vanish():
    limits = theory.step_size_limits(Problem(M=0), RING, 5)
    assert limits["n/(L M)"] == limits["n/(4 L M (P+1))"] == math.inf
    assert 0 < theory.max_step_size(Problem(M=0), RING, 5) < 1


def test_shape_of_the_rule():
    """More local steps and a slower graph ask for smaller steps."""
    steps = [theory.max_step_size(Problem(), RING, tau) for tau in (1, 2, 5, 40)]
    assert steps == sorted(steps, reverse=True)
    assert theory.max_step_size(Problem(), from_name("ring", 33), 5) < steps[2]


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: Problem(L=0), "L must be positive"),
        (lambda: Problem(sigma=-1), "sigma"),
        (lambda: Problem(P=math.nan), "P must be finite"),
        (lambda: theory.max_step_size(Problem(), RING, 0), "tau must be at least 1"),
        (lambda: theory.bound(Problem(), RING, 1, alpha=0, T=1, gap=1), "alpha"),
        (lambda: theory.bound(Problem(), RING, 1, alpha=1, T=0, gap=1), "T must"),
        (lambda: theory.bound(Problem(), RING, 1, alpha=1, T=1, gap=-1), "gap"),
        (lambda: theory.main(theory.Options(gamma=1.0)), "gamma must be at least 0 and below 1"),
        (lambda: theory.main(theory.Options(fragments=6)), "fragments must be from 1 to tau"),
    ],
)
def test_errors(make, reason):
    with pytest.raises(UserError, match=reason):
        make()


def test_command(capsys):
    theory.main(theory.Options(topology="ring", n=9, tau=5, L=1, M=2, alpha=0.01))
    out = capsys.readouterr().out
    largest = theory.max_step_size(Problem(M=2), RING, 5)
    bound = theory.bound(Problem(M=2), RING, 5, alpha=0.01, T=10_000, gap=1)
    words = out.split()
    assert words.count(f"{largest:.6g}") == 2  # the binding term, and the minimum
    assert f"{bound:.6g}" in words
    assert "above the rule" in out


def test_command_says_how_far_agents_are_apart(capsys):
    theory.main(theory.Options(topology="torus", n=16, tau=5, sigma=2, fragments=3, gamma=0.2))
    out = capsys.readouterr().out
    graph, flights = from_name("torus", 16), Flights.oldsgd(5, 3)
    said = theory.disagreement(graph, flights, sigma=2, zeta=1, gamma=0.2)
    row = next(line for line in out.splitlines() if "xoldsgd in 3 fragments  " in line)
    assert row.split()[-2:] == [f"{value:.6g}" for value in said]
    suits = next(line for line in out.splitlines() if "suits" in line)
    assert suits.split()[-1] == f"{theory.damping(graph, 5, 3):g}"


@pytest.mark.parametrize("name, n", [("one-peer-ring", 8), ("ring", 2001)])
def test_command_without_modes(capsys, name, n):
    theory.main(theory.Options(topology=name, n=n))
    assert "static W of at most 2000 agents" in capsys.readouterr().out


def test_command_unstable(capsys):
    """JSON has no infinity, and the table says what it is."""
    options = {"topology": "torus", "n": 16, "gamma": 0.9}
    theory.main(theory.Options(**options, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["disagreement"]["xoldsgd"] == {"boundary": None, "mean": None}
    assert report["xoldsgd"]["stable_below"] == pytest.approx(5 / 6)
    theory.main(theory.Options(**options))
    assert "infinite" in capsys.readouterr().out


def test_command_json(capsys):
    theory.main(theory.Options(topology="one-peer-exponential", n=8, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["p"] == 1 and report["limits"]["n/(L M)"] is None
    assert report["bound"] == pytest.approx(sum(report["terms"].values()))


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "hpc_oldsgd.theory", *args], capture_output=True, text=True
    )


def test_command_error():
    done = command("ring", "9", "--tau", "5", "--L", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hpc_oldsgd.theory: L must be positive and finite, not 0.\n"
