"""Topologies from a name, a networkx graph, a matrix or a file."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError, unknown
from .core import Floats, Ints, Round, Topology
from .graphs import GRAPHS, canonical, lattice_sides

NAMES = tuple(GRAPHS)
WEIGHTS = ("auto", "uniform", "metropolis", "lazy")

TOLERANCE = 1e-5  # of a given matrix, so that six printed digits do; it is then made exact


def from_name(name: str, n: int, weights: str = "auto", **options: Any) -> Topology:
    """A named graph of n agents: "ring", "torus:2x4", "erdos-renyi:0.3", "file:graph.csv", ...

    Options: rows and cols (torus, grid), probability and seed (erdos-renyi); None counts as absent.
    """
    n = _agents(n)
    options = {key: value for key, value in options.items() if value is not None}
    head, colon, tail = name.strip().partition(":")
    key = head.lower().replace("_", "-")
    if key == "file" and colon:
        return from_file(tail, n=n, weights=weights)
    if key not in GRAPHS:
        raise unknown("topology", head, NAMES, also=" and file:PATH")
    if colon:
        options |= _parse_suffix(key, tail)
    graph = GRAPHS[key]
    allowed = list(inspect.signature(graph).parameters)[1:]
    for option in options:
        if option not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no options"
            raise UserError(f"The topology {key} has no option {option!r}: it {takes}.")
    rounds = [_weighted(key, n, edges, weights) for edges in graph(n, **options)]
    if key in ("torus", "grid") and options:  # the name keeps the shape
        key += ":{}x{}".format(*lattice_sides(key, n, **options))
    elif colon:
        key += f":{tail}"
    return Topology(key, n, rounds)


def from_networkx(G: Any, weights: str = "auto") -> Topology:
    """Any undirected networkx graph; its nodes, sorted where they sort, become agents 0, 1, ...

    Loops, parallel edges and edge attributes do not count: for your own weights use from_matrix.
    """
    if G.is_directed():
        raise UserError(
            "The graph is directed, but agents exchange both ways; pass G.to_undirected()."
        )
    try:
        nodes = sorted(G.nodes)
    except TypeError:
        nodes = list(G.nodes)
    agent = {node: i for i, node in enumerate(nodes)}
    n = _agents(len(nodes))
    pairs = np.array([(agent[u], agent[v]) for u, v in G.edges()], dtype=np.int64).reshape(-1, 2)
    name = str(G.name) or "networkx graph"
    return Topology(name, n, [_weighted(name, n, canonical(n, *pairs.T), weights)])


def from_matrix(W: npt.ArrayLike | Sequence[npt.ArrayLike], name: str = "matrix") -> Topology:
    """A mixing matrix of your own, or several (k, n, n): one per round of a period."""
    try:
        array = np.asarray(W)
        if array.dtype.kind not in "biuf":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise UserError(f"The {name} is not an array of real numbers.") from None
    stack = array if array.ndim == 3 else array[None]
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2]:
        shape = "x".join(map(str, array.shape)) or "a single number"
        raise UserError(f"The {name} must be square, and it is {shape}.")
    if 0 in stack.shape:
        raise UserError(f"The {name} is empty.")
    return Topology(name, stack.shape[1], [_checked(w, name) for w in stack])


def from_file(path: str | Path, n: int | None = None, weights: str = "auto") -> Topology:
    """A matrix (.npy or text) or an edge list (text: `i j` or `i j w_ij` per line, agents from 0).

    Text is separated by blanks or commas, # starts a comment. Two or three columns of which the
    first two hold whole numbers are an edge list, a square of numbers is a matrix. `weights`
    applies to edges without a weight.
    """
    path = Path(path)
    rows = _read(path)
    whole = (rows[:, :2] == np.floor(rows[:, :2])).all() and (rows[:, :2] >= 0).all()
    if path.suffix != ".npy" and rows.shape[1] in (2, 3) and whole:
        topology = _from_edges(path, rows, n, weights)
    else:
        topology = from_matrix(rows, name=str(path))
    if n is not None and topology.n != n:
        raise UserError(f"{path} is a topology of {topology.n} agents, and there are {n}.")
    return topology


def _agents(n: int) -> int:
    try:
        n = operator.index(n)
    except TypeError:
        raise UserError(f"The number of agents must be a whole number, not {n!r}.") from None
    if n < 1:
        raise UserError(f"A topology needs at least 1 agent, not {n}.")
    return n


def _parse_suffix(key: str, text: str) -> dict[str, Any]:
    """The part after the colon: torus:2x4, grid:2x4, erdos-renyi:0.3."""
    try:
        if key in ("torus", "grid"):
            rows, cols = text.lower().split("x")
            return {"rows": int(rows), "cols": int(cols)}
        if key == "erdos-renyi":
            return {"probability": float(text)}
    except ValueError:
        shape = "0.3" if key == "erdos-renyi" else "2x4"
        raise UserError(f"Cannot read {key}:{text}; write it like {key}:{shape}.") from None
    raise UserError(f"The topology {key} takes nothing after a colon, and got {text!r}.")


def _weighted(name: str, n: int, edges: Ints, weights: str) -> Round:
    """Metropolis-Hastings, w_ij = 1 / (1 + max(deg_i, deg_j)): the uniform 1 / (deg + 1) where
    degrees are equal. Lazy is half of that, and half staying."""
    if weights not in WEIGHTS:
        raise unknown("kind of weights", weights, WEIGHTS)
    degrees = np.bincount(edges.ravel(), minlength=n)
    active = degrees[degrees > 0]
    regular = bool((active == active[0]).all()) if len(active) else True
    if weights == "uniform" and not regular:
        raise UserError(
            f"Uniform weights need equal degrees, and those of {name} go from {active.min()} "
            f"to {active.max()}; use metropolis."
        )
    w = 1.0 / (1.0 + np.maximum(degrees[edges[:, 0]], degrees[edges[:, 1]]))
    # The plain 1 / (deg + 1) rather than what is left to 1, which differs in the last bit.
    own: Any = 1.0 / (1.0 + degrees) if regular else None
    if weights == "lazy":
        w = w / 2
        own = None if own is None else (1.0 + own) / 2
    return Round.from_edges(n, edges, w, own)


def _checked(W: Floats, name: str) -> Round:
    """A given matrix, verified, then made exactly symmetric with rows that sum to 1 to rounding."""

    def first(bad: npt.NDArray[np.bool_]) -> str:
        i, j = (int(k) for k in np.argwhere(bad)[0])
        return f"entry ({i}, {j}) is {W[i, j]:g}"

    if (bad := ~np.isfinite(W)).any():
        raise UserError(f"The {name} must be finite, and {first(bad)}.")
    if (bad := W < 0).any():
        raise UserError(f"The {name} must not be negative, and {first(bad)}.")
    if (bad := W > 1 + TOLERANCE).any():
        raise UserError(f"The {name} is not doubly stochastic: {first(bad)}, over 1.")
    if (bad := abs(W - W.T) > TOLERANCE).any():
        i, j = (int(k) for k in np.argwhere(bad)[0])
        raise UserError(
            f"The {name} is not symmetric: entry ({i}, {j}) is {W[i, j]:g} "
            f"and entry ({j}, {i}) is {W[j, i]:g}."
        )
    sums = W.sum(axis=1)
    if (abs(sums - 1) > TOLERANCE).any():
        i = int(np.argmax(abs(sums - 1)))
        raise UserError(
            f"The {name} is not doubly stochastic: row {i} sums to {sums[i]:.6g}, not 1."
        )
    W = (W + W.T) / 2
    own = W.diagonal().copy()
    np.fill_diagonal(W, 0.0)
    W /= max(1.0, W.sum(axis=1).max())  # nobody may give away more than there is
    excess = W.sum(axis=1) + own - 1
    own = np.where(abs(excess) > 1e-12, np.maximum(own - excess, 0), own)
    rows, cols = np.nonzero(np.triu(W, 1))
    return Round.from_edges(len(W), np.stack([rows, cols], axis=1), W[rows, cols], own)


def _read(path: Path) -> Floats:
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            if array.dtype.kind not in "biuf" or array.ndim != 2:
                raise UserError(f"{path} does not hold a matrix of real numbers.")
            with np.errstate(all="ignore"):  # what does not fit becomes infinite, and is refused
                return array.astype(np.float64)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
    except UserError:
        raise
    except Exception:  # numpy's reader fails in many ways on a damaged header
        what = "an intact .npy file" if path.suffix == ".npy" else "a text file"
        raise UserError(f"{path} is not {what} of numbers.") from None
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].replace(",", " ")
        try:
            row = [float(word) for word in line.split()]
        except ValueError:
            raise UserError(
                f"Line {number} of {path} is not numeric: {line.strip()[:40]!r}."
            ) from None
        if row and rows and len(row) != len(rows[0]):
            raise UserError(
                f"Line {number} of {path} has {len(row)} numbers where the lines before it have "
                f"{len(rows[0])}."
            )
        if row:
            rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no numbers.")
    return np.array(rows)


def _from_edges(path: Path, rows: Floats, n: int | None, weights: str) -> Topology:
    if rows[:, :2].max() > 2**53:  # past this a float skips whole numbers
        raise UserError(f"{path} has an agent {rows[:, :2].max():g}, which is no agent's number.")
    i, j = rows[:, :2].astype(np.int64).T
    if (loops := i == j).any():
        raise UserError(
            f"{path} has a loop at agent {i[loops][0]}; leave it out: an agent keeps what its "
            "neighbours leave."
        )
    agents = int(max(i.max(), j.max())) + 1
    if n is not None and agents > n:
        raise UserError(
            f"{path} has an agent {agents - 1}, and there are {n} agents, numbered from 0."
        )
    n = _agents(agents if n is None else n)
    if len(rows) < n - 1:  # also keeps a stray huge number from asking for huge arrays
        raise UserError(f"{path} is disconnected: {len(rows)} edges cannot join {n} agents.")
    edges = canonical(n, i, j)
    if rows.shape[1] == 2:
        return Topology(str(path), n, [_weighted(str(path), n, edges, weights)])
    if not (np.isfinite(rows[:, 2]).all() and (rows[:, 2] > 0).all()):
        raise UserError(f"The weights in {path} must be positive and finite.")
    keys, at = np.unique(np.minimum(i, j) * n + np.maximum(i, j), return_inverse=True)
    w = np.zeros(len(keys))
    w[at] = rows[:, 2]
    if (w[at] != rows[:, 2]).any():
        raise UserError(f"{path} gives one edge two different weights.")
    own = 1.0 - np.bincount(edges.ravel(), weights=np.repeat(w, 2), minlength=n)
    if own.min() < -TOLERANCE:
        k = int(own.argmin())
        raise UserError(
            f"{path} is not doubly stochastic: the weights of agent {k} sum to {1 - own[k]:.6g}, "
            "over 1."
        )
    w /= max(1.0, float((1 - own).max()))
    own = 1.0 - np.bincount(edges.ravel(), weights=np.repeat(w, 2), minlength=n)
    return Topology(str(path), n, [Round.from_edges(n, edges, w, np.maximum(own, 0))])
