"""Every graph, size and weight: symmetric, doubly stochastic, connected, lambda_2 as known."""

from math import cos, isqrt, pi

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_oldsgd import topology
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.topology import NAMES, Topology, from_file, from_matrix, from_name, from_networkx
from hpc_oldsgd.topology.core import Round

IRREGULAR = ("grid", "star", "erdos-renyi")


@st.composite
def topologies(draw):
    name = draw(st.sampled_from(NAMES))
    n = 2 ** draw(st.integers(0, 6)) if name == "hypercube" else draw(st.integers(1, 40))
    kinds = ["auto", "metropolis", "lazy"] + (["uniform"] if name not in IRREGULAR else [])
    weights = draw(st.sampled_from(kinds))
    seed = {"seed": draw(st.integers(0, 99))} if name == "erdos-renyi" else {}
    return from_name(name, n, weights=weights, **seed)


def second_eigenvalue(W):
    """Independent of Topology: the spectral norm of W - 11^T/n."""
    return np.linalg.norm(W - 1 / len(W), 2)


@settings(max_examples=100, deadline=None)
@given(topologies())
def test_every_W_is_a_mixing_matrix(t):
    product = np.eye(t.n)
    union = nx.Graph()
    union.add_nodes_from(range(t.n))
    for r in range(t.period):
        W = t.matrix(r)
        assert W.dtype == np.float64 and W.shape == (t.n, t.n)
        assert (W == W.T).all()
        assert (W >= 0).all()
        np.testing.assert_allclose(W.sum(axis=1), 1, rtol=0, atol=4e-16 * max(4, t.degree))
        union.add_edges_from(t.edges(r))
        product = W @ product
    assert nx.is_connected(union)
    assert t.lambda_2 == pytest.approx(second_eigenvalue(product), abs=1e-10)
    assert t.n == 1 or t.lambda_2 < 1
    assert t.p == 1 - t.lambda_2**2


@settings(max_examples=60, deadline=None)
@given(topologies(), st.integers(0, 1000))
def test_all_views_agree(t, r):
    """neighbours, self_weight, csr, edges and matrix tell the same, and repeat with the period."""
    W = t.matrix(r)
    assert (t.matrix(r % t.period) == W).all()
    indptr, indices, weights = t.csr(r)
    edges = set(t.edges(r))
    assert len(edges) == len(t.edges(r)) and all(i < j for i, j in edges)
    for i in range(t.n):
        listed = t.neighbours(i, r)
        js = [j for j, _ in listed]
        assert js == sorted(set(js)) and i not in js
        assert js == [j for j in range(t.n) if j != i and W[i, j] > 0]
        assert [w for _, w in listed] == [W[i, j] for j in js]
        assert t.self_weight(i, r) == W[i, i] == t.self_weights(r)[i]
        assert indices[indptr[i] : indptr[i + 1]].tolist() == js
        assert weights[indptr[i] : indptr[i + 1]].tolist() == [w for _, w in listed]
        assert all((min(i, j), max(i, j)) in edges for j in js)
        assert len(js) <= t.degree
        assert t.n == 1 or t.period > 1 or len(js) > 0
    assert 2 * len(edges) == len(indices)
    assert (t.matrix(0) == t.W).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9, 16, 33])
def test_ring_closed_form(n):
    t = from_name("ring", n)
    expected = max((abs(1 + 2 * cos(2 * pi * k / n)) / 3 for k in range(1, n)), default=0)
    assert t.lambda_2 == pytest.approx(expected if n > 2 else 0, abs=1e-12)
    assert t.degree == min(2, n - 1)
    assert len(t.edges()) == (n if n > 2 else n - 1)


def test_ring_of_nine_is_the_papers():
    t = from_name("ring", 9)
    assert t.neighbours(0) == ((1, 1 / 3), (8, 1 / 3))
    assert t.neighbours(4) == ((3, 1 / 3), (5, 1 / 3))
    assert t.self_weight(4) == 1 / 3
    assert t.p == pytest.approx(1 - ((1 + 2 * cos(2 * pi / 9)) / 3) ** 2)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_complete_averages_at_once(n):
    t = from_name("complete", n)
    assert t.lambda_2 == 0 and t.p == 1
    np.testing.assert_allclose(t.W, 1 / n, rtol=1e-15)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_hypercube_closed_form(k):
    t = from_name("hypercube", 2**k)
    expected = max((abs(1 + k - 2 * m) / (k + 1) for m in range(1, k + 1)), default=0)
    assert t.lambda_2 == pytest.approx(expected, abs=1e-12)
    assert t.degree == k


@pytest.mark.parametrize("rows, cols", [(3, 3), (3, 4), (4, 5), (6, 6)])
def test_torus_closed_form(rows, cols):
    t = from_name("torus", rows * cols, rows=rows, cols=cols)
    spectrum = [
        (1 + 2 * cos(2 * pi * a / rows) + 2 * cos(2 * pi * b / cols)) / 5
        for a in range(rows)
        for b in range(cols)
    ]
    assert t.lambda_2 == pytest.approx(sorted(map(abs, spectrum))[-2], abs=1e-12)
    assert t.degree == 4


def test_lazy_weights_close_half_the_gap():
    """(I + W)/2 maps the eigenvalues 1/3 and -1/3 of a ring of four to 2/3 and 1/3."""
    assert from_name("ring", 4, weights="lazy").lambda_2 == pytest.approx(2 / 3)
    assert from_name("ring", 4).lambda_2 == pytest.approx(1 / 3)


def test_star_is_metropolis():
    t = from_name("star", 5)
    assert t.neighbours(3) == ((0, 1 / 5),)
    assert t.self_weight(3) == pytest.approx(4 / 5)
    assert t.self_weight(0) == pytest.approx(1 / 5)
    assert t.lambda_2 == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    "name, n, rows, cols",
    [("torus", 9, 3, 3), ("torus", 12, 3, 4), ("torus", 7, 1, 7), ("grid", 6, 2, 3)],
)
def test_near_square_sides(name, n, rows, cols):
    periodic = name == "torus"
    expected = nx.grid_2d_graph(rows, cols, periodic=periodic)
    edges = {tuple(sorted((a * cols + b, c * cols + d))) for (a, b), (c, d) in expected.edges}
    edges = {(i, j) for i, j in edges if i != j}
    assert set(from_name(name, n).edges()) == edges
    assert from_name(f"{name}:{rows}x{cols}", n).edges() == from_name(name, n).edges()
    assert rows == isqrt(n) or n % isqrt(n) != 0


@pytest.mark.parametrize("n, degree", [(2, 1), (4, 2), (6, 3), (8, 3), (10, 3)])
def test_thin_torus_has_no_double_edges(n, degree):
    t = from_name("torus", n, rows=2)
    assert t.degree == degree
    assert t.W.max() == 1 / (degree + 1)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_one_peer_exponential_averages_in_log2_n_rounds(k):
    t = from_name("one-peer-exponential", 2**k)
    assert t.period == k and t.degree == 1
    x = np.random.default_rng(k).standard_normal(2**k)
    mean = x.mean()
    for r in range(k):
        x = t.matrix(r) @ x
    np.testing.assert_allclose(x, mean, atol=1e-14)


@pytest.mark.parametrize("name", ["one-peer-exponential", "one-peer-ring"])
@pytest.mark.parametrize("n", range(1, 24))
def test_one_peer_graphs_are_pairings(name, n):
    t = from_name(name, n)
    assert t.degree == min(1, n - 1)
    for r in range(t.period):
        resting = [i for i in range(n) if not t.neighbours(i, r)]
        assert len(resting) == n % 2
        assert all(t.self_weight(i, r) == (1 if i in resting else 0.5) for i in range(n))
    if name == "one-peer-ring":
        union = {edge for r in range(t.period) for edge in t.edges(r)}
        assert union == set(from_name("ring", n).edges())


def test_erdos_renyi_repeats_and_is_connected():
    first = from_name("erdos-renyi", 30, seed=3, probability=0.12)
    again = from_name("erdos-renyi", 30, seed=3, probability=0.12)
    other = from_name("erdos-renyi", 30, seed=4, probability=0.12)
    assert first.edges() == again.edges() != other.edges()
    assert 20 < len(first.edges()) < 100  # 52 expected
    assert from_name("erdos-renyi:0.12", 30, seed=3).edges() == first.edges()


def test_networkx_and_matrix_round_trip():
    G = nx.petersen_graph()
    t = from_networkx(G)
    assert t.n == 10 and t.degree == 3 and t.lambda_2 == pytest.approx(1 / 2)
    assert set(t.edges()) == {tuple(sorted(e)) for e in G.edges}
    assert (from_matrix(t.W).W == t.W).all()
    shuffled = nx.Graph([(2, 1), (1, 0)])
    assert from_networkx(shuffled).edges() == [(0, 1), (1, 2)]
    named = from_networkx(nx.Graph([("b", "a"), ("c", "b"), ("b", "b")]))
    assert named.edges() == [(0, 1), (1, 2)]


def test_given_matrix_is_made_exact():
    """Six printed digits are accepted; rows then sum to 1 and W is symmetric to the last bit."""
    t = from_matrix(np.round(from_name("ring", 9).W, 6))
    assert (t.W == t.W.T).all()
    np.testing.assert_allclose(t.W.sum(axis=0), 1, atol=4e-16)


def test_given_weights_that_leave_nothing_to_oneself_are_made_exact(tmp_path):
    """Rounded up, all of a row would be more than 1, and a diagonal of 0 cannot give way."""
    W = np.round((np.ones((7, 7)) - np.eye(7)) / 6, 6)
    edges = tmp_path / "edges.txt"
    edges.write_text("".join(f"{i} {j} {W[i, j]}\n" for i in range(7) for j in range(i)))
    for t in (from_matrix(W), from_file(edges)):
        np.testing.assert_allclose(t.W.sum(axis=0), 1, atol=4e-16)
        assert (t.W >= 0).all() and (t.W == t.W.T).all()


def test_rounds_of_ones_own_are_checked():
    edges = np.array([[0, 1], [1, 2]])
    with pytest.raises(UserError, match="negative"):
        Topology("mine", 3, [Round.from_edges(3, edges, np.array([0.9, 0.9]))])
    with pytest.raises(UserError, match=r"a row sums to 0\.8"):
        Topology("mine", 3, [Round.from_edges(3, edges, np.full(2, 0.3), np.full(3, 0.5))])


def test_matrices_of_a_period():
    first, second = from_name("one-peer-ring", 4).matrix(0), from_name("one-peer-ring", 4).matrix(1)
    t = from_matrix([first, second])
    assert t.period == 2 and t.edges(1) == [(0, 3), (1, 2)]
    with pytest.raises(UserError, match="disconnected over its period of 2 rounds"):
        from_matrix([first, first])


@pytest.mark.parametrize("name", ["ring", "torus", "one-peer-exponential", "one-peer-ring"])
def test_large_graphs_stay_sparse(name, monkeypatch):
    """4096 agents without a dense W; Lanczos agrees with the closed form or the dense solver."""
    t = from_name(name, 4096)
    assert len(t.neighbours(4095, 7)) == t.degree
    assert "W" not in vars(t)
    small = from_name(name, 256)
    dense = small.lambda_2
    monkeypatch.setattr(topology.core, "DENSE_LIMIT", 100)
    assert from_name(name, 256).lambda_2 == pytest.approx(dense, abs=1e-10)
    if name == "ring":
        assert t.lambda_2 == pytest.approx((1 + 2 * cos(2 * pi / 4096)) / 3, abs=1e-12)


def test_read_only():
    t = from_name("ring", 5)
    for array in (t.W, *t.csr(), t.self_weights()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
    with pytest.raises(UserError, match="no agent 5"):
        t.neighbours(5)
    with pytest.raises(UserError, match="no agent -1"):
        t.neighbours(-1)
