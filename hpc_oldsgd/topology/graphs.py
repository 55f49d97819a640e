"""The named graphs: n agents -> the edges (m, 2), i < j, of each round of a period."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from ..errors import UserError
from .core import Ints

Edges = list[Ints]  # one array per round


def canonical(n: int, i: Ints, j: Ints) -> Ints:
    """Undirected edges as (m, 2), i < j, sorted, each once; loops are dropped."""
    low, high = np.minimum(i, j), np.maximum(i, j)
    keys = np.unique((low * n + high)[low != high])
    return np.stack(np.divmod(keys, n), axis=1)


def ring(n: int) -> Edges:
    i = np.arange(n)
    return [canonical(n, i, (i + 1) % n)]


def torus(n: int, rows: int | None = None, cols: int | None = None) -> Edges:
    return [_lattice(n, *lattice_sides("torus", n, rows, cols), wrap=True)]


def grid(n: int, rows: int | None = None, cols: int | None = None) -> Edges:
    return [_lattice(n, *lattice_sides("grid", n, rows, cols), wrap=False)]


def complete(n: int) -> Edges:
    return [np.stack(np.triu_indices(n, 1), axis=1)]


def star(n: int) -> Edges:
    """Agent 0 is the centre."""
    i = np.arange(1, n)
    return [canonical(n, np.zeros_like(i), i)]


def hypercube(n: int) -> Edges:
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise UserError(
            f"A hypercube needs a power of two agents and {n} is none; use {below} or {2 * below}, "
            "or another graph."
        )
    i = np.arange(n)
    return [_joined(n, [i ^ (1 << k) for k in range(n.bit_length() - 1)])]


def exponential(n: int) -> Edges:
    """i and i +- 2^k (mod n) for every 2^k < n: about 2 log2(n) neighbours."""
    i = np.arange(n)
    return [_joined(n, [(i + (1 << k)) % n for k in range((n - 1).bit_length())])]


def one_peer_exponential(n: int) -> Edges:
    """Each round pairs the agents anew, so each sends one message per round.

    n = 2^k: round r pairs i with i xor 2^r, and k rounds average exactly. Otherwise, with m = n
    rounded up to even, round r pairs every even i with i + 2^{r+1} - 1 (mod m), for all hops below
    m; for odd n whoever is paired with the missing agent m - 1 rests.
    """
    if n & (n - 1) == 0:
        i = np.arange(n)
        return [canonical(n, i, i ^ (1 << k)) for k in range(n.bit_length() - 1)] or ring(n)
    m = n + n % 2
    even = np.arange(0, m, 2)
    hops = [(2 << r) - 1 for r in range(m.bit_length()) if (2 << r) - 1 < m]
    rounds = []
    for hop in hops:
        pairs = np.stack([even, (even + hop) % m], axis=1)
        pairs = pairs[(pairs < n).all(axis=1)]
        rounds.append(canonical(n, pairs[:, 0], pairs[:, 1]))
    return rounds


def one_peer_ring(n: int) -> Edges:
    """The ring's even edges, then its odd ones; an odd ring takes three, one agent resting."""
    if n <= 2:
        return ring(n)
    i = np.arange(n - 1)
    even, odd = i[0 : n - 1 : 2], i[1 : n - 1 : 2]
    if n % 2 == 0:
        odd = np.r_[odd, n - 1]
        return [canonical(n, e, (e + 1) % n) for e in (even, odd)]
    # The edge (n-1, 0), and odd edges that do not touch it.
    closing = np.r_[n - 1, i[1 : n - 3 : 2]]
    return [canonical(n, e, (e + 1) % n) for e in (even, odd, closing)]


def erdos_renyi(n: int, probability: float | None = None, seed: int = 0) -> Edges:
    """Each edge with the given probability (default 2 ln n / n), drawn again until connected."""
    if probability is None:
        probability = min(1.0, 2 * math.log(n) / n) if n > 2 else 1.0
    if not 0 < probability <= 1:
        raise UserError(f"The edge probability must be in (0, 1], not {probability:g}.")
    if seed < 0:
        raise UserError(f"The seed of erdos-renyi must not be negative, and {seed} is.")
    i, j = np.triu_indices(n, 1)
    for attempt in range(200):
        kept = np.random.default_rng([seed, attempt]).random(len(i)) < probability
        edges = np.stack([i[kept], j[kept]], axis=1)
        if _connected(n, edges):
            return [edges]
    raise UserError(
        f"No connected graph of {n} agents came up in 200 draws at edge probability "
        f"{probability:g}; raise it (2 ln n / n is {min(1.0, 2 * math.log(n) / n):.3g})."
    )


_ALL: tuple[Callable[..., Edges], ...] = (
    ring, torus, grid, complete, star, hypercube, exponential, one_peer_exponential, one_peer_ring,
    erdos_renyi,
)  # fmt: skip
GRAPHS = {graph.__name__.replace("_", "-"): graph for graph in _ALL}


def _joined(n: int, maps: list[Ints]) -> Ints:
    """i joined to its image under each map."""
    i = np.arange(n)
    return canonical(n, np.tile(i, len(maps)), np.concatenate([i[:0], *maps]))


def _connected(n: int, edges: Ints) -> bool:
    if len(edges) < n - 1:
        return False
    graph = sp.csr_array((np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(n, n))
    return bool(connected_components(graph, directed=False, return_labels=False) == 1)


def _lattice(n: int, rows: int, cols: int, wrap: bool) -> Ints:
    """Agent i sits at (i // cols, i % cols). A side of 1 or 2 wraps onto itself: edges merge."""
    at = np.arange(n).reshape(rows, cols)
    if wrap:
        pairs = [(at, np.roll(at, -1, axis)) for axis in (0, 1)]
    else:
        pairs = [(at[:-1], at[1:]), (at[:, :-1], at[:, 1:])]
    i, j = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    return canonical(n, i, j)


def lattice_sides(
    name: str, n: int, rows: int | None = None, cols: int | None = None
) -> tuple[int, int]:
    """rows x cols, the missing ones filled in; near-square when both are."""
    for side in (rows, cols):
        if side is not None and side < 1:
            raise UserError(f"The sides of a {name} must be at least 1, not {side}.")
    if rows is None and cols is None:
        rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    if rows is None:
        assert cols is not None
        rows = n // cols
    if cols is None:
        cols = n // rows
    if rows * cols != n:
        raise UserError(f"A {rows}x{cols} {name} has {rows * cols} agents, and there are {n}.")
    return rows, cols
