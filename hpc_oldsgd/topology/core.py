"""Topology: the graph of the agents and its mixing matrix W, kept sparse.

Every W^r is symmetric and doubly stochastic. Agent i lists its neighbours in ascending order; that
order is the order of summation everywhere, so results repeat bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator, eigsh

from ..errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DENSE_LIMIT = 2000  # past this lambda_2 comes from Lanczos: a dense solve costs n^3
_ZERO = 1e-12  # an eigenvalue below this is rounding


@dataclass(frozen=True)
class Round:
    """The W of one round: the neighbours of all agents in CSR form, and the diagonal apart."""

    indptr: Ints
    indices: Ints
    weights: Floats
    self_weights: Floats

    @staticmethod
    def from_edges(n: int, edges: Ints, w: Floats, self_weights: Any = None) -> Round:
        """Edges (m, 2) with i < j, each once; without a diagonal, it is what is left to 1."""
        i, j = edges[:, 0], edges[:, 1]
        rows, cols, data = np.r_[j, i], np.r_[i, j], np.r_[w, w]
        matrix = sp.coo_array((data, (rows, cols)), shape=(n, n)).tocsr()  # a counting sort
        matrix.sort_indices()
        if self_weights is None:
            self_weights = 1.0 - np.bincount(rows, weights=data, minlength=n)
        indptr, indices = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)
        arrays = indptr, indices, matrix.data, np.array(self_weights, dtype=np.float64)
        for array in arrays:
            array.setflags(write=False)
        return Round(*arrays)

    @property
    def degrees(self) -> Ints:
        return np.diff(self.indptr)

    def sparse(self) -> Any:
        """W as a scipy CSR array, diagonal included."""
        n = len(self.self_weights)
        off_diagonal = sp.csr_array((self.weights, self.indices, self.indptr), shape=(n, n))
        return (off_diagonal + sp.diags_array(self.self_weights)).tocsr()


class Topology:
    """A connected graph of n agents with mixing weights; `period` rounds repeat (1: static)."""

    def __init__(self, name: str, n: int, rounds: Sequence[Round]) -> None:
        self.name = name
        self.n = n
        self._rounds = tuple(rounds)
        _check_mixes(self)

    @property
    def period(self) -> int:
        return len(self._rounds)

    @cached_property
    def W(self) -> Floats:
        """The dense W of round 0 (n^2 doubles, built on first use)."""
        return self.matrix(0)

    def matrix(self, round: int = 0) -> Floats:
        """The dense W of a round, read-only; built anew at every call."""
        W: Floats = self._round(round).sparse().toarray()
        W.setflags(write=False)
        return W

    def neighbours(self, i: int, round: int = 0) -> tuple[tuple[int, float], ...]:
        """(j, w_ij) for every j != i that i talks to in this round, ascending in j."""
        r, i = self._round(round), self._agent(i)
        row = slice(r.indptr[i], r.indptr[i + 1])
        return tuple(zip(r.indices[row].tolist(), r.weights[row].tolist(), strict=True))

    def self_weight(self, i: int, round: int = 0) -> float:
        return float(self._round(round).self_weights[self._agent(i)])

    def csr(self, round: int = 0) -> tuple[Ints, Ints, Floats]:
        """(indptr, indices, weights): `neighbours` of all agents, in the same order."""
        r = self._round(round)
        return r.indptr, r.indices, r.weights

    def self_weights(self, round: int = 0) -> Floats:
        """The diagonal of W."""
        return self._round(round).self_weights

    def edges(self, round: int = 0) -> list[tuple[int, int]]:
        """Undirected edges (i, j), i < j, in lexicographic order."""
        r = self._round(round)
        i = np.repeat(np.arange(self.n), r.degrees)
        upper = i < r.indices
        return list(zip(i[upper].tolist(), r.indices[upper].tolist(), strict=True))

    @property
    def degree(self) -> int:
        """The most neighbours any agent has in any round: messages it sends in that round."""
        return max(int(r.degrees.max(initial=0)) for r in self._rounds)

    @cached_property
    def lambda_2(self) -> float:
        """The second largest absolute eigenvalue of W: the disagreement that one round leaves.

        For a time-varying graph: the largest singular value of W^{k-1} ... W^0 - 11^T/n over one
        period k, which is the same number when k = 1.
        """
        if self.n == 1:
            return 0.0
        matrices = [r.sparse() for r in self._rounds]
        value = _dense_norm(matrices) if self.n <= DENSE_LIMIT else _lanczos_norm(matrices)
        return 0.0 if value < _ZERO else min(value, 1.0)

    @property
    def p(self) -> float:
        """1 - lambda_2^2, the consensus rate of the theory (of a period when time-varying)."""
        return 1.0 - self.lambda_2**2

    def __repr__(self) -> str:
        varying = f", period={self.period}" if self.period > 1 else ""
        return f"Topology({self.name!r}, n={self.n}, degree={self.degree}{varying})"

    def digest(self) -> str:
        """Equal for topologies that mix alike: of the weights of all rounds."""
        text = hashlib.sha256()
        for phase in range(self.period):
            for array in self.csr(phase):
                text.update(array.tobytes())
        return text.hexdigest()[:16]

    def _round(self, round: int) -> Round:
        return self._rounds[round % len(self._rounds)]

    def _agent(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise UserError(f"There is no agent {i} in a topology of {self.n} agents.")
        return i


def _dense_norm(matrices: Sequence[Any]) -> float:
    n = matrices[0].shape[0]
    if len(matrices) == 1:
        eigenvalues = np.linalg.eigvalsh(matrices[0].toarray())
        return float(max(abs(eigenvalues[0]), abs(eigenvalues[-2])))
    product = np.eye(n) - 1.0 / n
    for W in matrices:
        product = W @ product
    return float(np.linalg.norm(product, 2))


def _lanczos_norm(matrices: Sequence[Any]) -> float:
    """The same by Lanczos on W - 11^T/n, or on P^T P for a product P of several rounds."""
    n = matrices[0].shape[0]
    static = len(matrices) == 1
    sequence = matrices if static else [*matrices, *reversed(matrices)]

    def apply(v: Floats) -> Floats:
        v = v - v.mean()
        for W in sequence:
            v = W @ v
        return v - v.mean()

    v0 = np.random.default_rng(0).standard_normal(n)
    if np.linalg.norm(apply(v0)) < _ZERO * np.linalg.norm(v0):
        return 0.0  # averages exactly, and ARPACK refuses the zero operator
    operator = LinearOperator((n, n), matvec=apply, dtype=np.float64)
    (value,) = eigsh(
        operator, k=1, which="LM", ncv=64, tol=1e-12, maxiter=100_000, v0=v0,
        return_eigenvectors=False,
    )  # fmt: skip
    return float(abs(value) if static else np.sqrt(abs(value)))


def _check_mixes(topology: Topology) -> None:
    """Reject weights that lose the mean, and a graph whose agents never agree.

    That is one that is disconnected, or has an eigenvalue -1.
    """
    n, period = topology.n, topology.period
    for r in topology._rounds:
        sums = r.sparse().sum(axis=1)
        if min(r.self_weights.min(initial=0), r.weights.min(initial=0)) < -1e-12:
            raise UserError(f"The {topology.name} has negative weights.")
        if n and not abs(sums - 1).max() < 1e-9:
            raise UserError(
                f"The {topology.name} is not doubly stochastic: a row sums to "
                f"{sums[abs(sums - 1).argmax()]:.6g}, not 1."
            )
    i = np.concatenate([np.repeat(np.arange(n), r.degrees) for r in topology._rounds])
    j = np.concatenate([r.indices for r in topology._rounds])
    graph = sp.csr_array((np.ones(len(i), dtype=np.int8), (i, j)), shape=(n, n))
    parts, label = connected_components(graph, directed=False)
    if parts > 1:
        lone = int(np.flatnonzero(label != label[0])[0])
        over = f" over its period of {period} rounds" if period > 1 else ""
        raise UserError(
            f"The {topology.name} is disconnected{over}: it has {parts} parts, "
            f"and agents 0 and {lone} never hear of each other."
        )
    if n == 1 or all((r.self_weights > 0).all() for r in topology._rounds):
        return
    if period > 1:
        oscillates = topology.lambda_2 > 1 - _ZERO
    elif topology.self_weights().any():
        oscillates = False
    else:  # -1 is an eigenvalue when the graph is bipartite, so its double cover falls apart
        cover = sp.block_array([[None, graph], [graph, None]])
        oscillates = connected_components(cover, directed=False)[0] > 1
    if oscillates:
        raise UserError(
            f"The {topology.name} never averages (lambda_2 is 1): agents swap models and keep "
            "nothing of their own; give W a positive diagonal."
        )
