"""Whatever is given as a topology: it mixes, or is refused in one sentence. See `make fuzz`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_oldsgd.topology import Topology, from_file, from_matrix, from_name
from support.random_input import cases, numbers, refused_or, values


def mixes(topology: Topology) -> None:
    """What every topology promises, however it came about."""
    for r in range(topology.period):
        W = topology.matrix(r)
        assert (W >= 0).all() and (W == W.T).all()
        assert np.allclose(W.sum(axis=1), 1, atol=1e-12)
    assert 0 <= topology.lambda_2 <= 1


@cases
@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1, max_size=6), st.data())
@example([["0", "1e300"], ["1", "2"]], None)
@example([["0", "1", "0.5"], ["1", "0", "0.5"]], None)
def test_topology_texts(folder: Path, lines: list[list[str]], data: st.DataObject | None) -> None:
    separator = data.draw(st.sampled_from([" ", ",", "\t", ", "])) if data else " "
    text = "\n".join(separator.join(line) for line in lines)
    if data and data.draw(st.booleans()):  # all lines alike, so that more of them are a graph
        text = "\n".join(separator.join((line * 4)[: len(lines[0])]) for line in lines)
    (folder / "graph.txt").write_text(text)
    n = data.draw(st.none() | st.integers(0, 7)) if data else None
    found = refused_or(lambda: from_file(folder / "graph.txt", n=n))
    if found is not None:
        mixes(found)


@cases
@given(st.binary(max_size=300))
@example(b"PK\x03\x04" + bytes(60))
@example(
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999, 9999), }"
)
def test_topology_bytes(folder: Path, content: bytes) -> None:
    for name in ("graph.txt", "graph.npy"):
        (folder / name).write_bytes(content)
        found = refused_or(lambda name=name: from_file(folder / name))
        if found is not None:
            mixes(found)


@cases
@given(st.data())
def test_topology_arrays_damaged(folder: Path, data: st.DataObject) -> None:
    """A .npy file of a good matrix with some bytes changed or cut off."""
    buffer = io.BytesIO()
    np.save(buffer, from_name("ring", data.draw(st.integers(1, 5))).W)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    (folder / "W.npy").write_bytes(content[: cut or None])
    found = refused_or(lambda: from_file(folder / "W.npy"))
    if found is not None:
        mixes(found)


@cases
@given(
    st.text(max_size=12)
    | st.builds(
        "{}{}{}".format,
        st.sampled_from(["ring", "torus", "grid", "erdos-renyi", "star", "file", "Hypercube"]),
        st.sampled_from(["", ":", ":2x2", ":0x4", ":-1x-4", ":x", ":0.5", ":nan", "::"]),
        st.text(max_size=3),
    ),
    st.integers(-1, 9),
    st.sampled_from(["auto", "uniform", "metropolis", "lazy", "none"]),
)
def test_topology_names(name: str, n: int, weights: str) -> None:
    found = refused_or(lambda: from_name(name, n, weights=weights))
    if found is not None:
        assert found.n == n
        mixes(found)


@cases
@given(values | st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=3), max_size=3))
def test_matrices(value: Any) -> None:
    found = refused_or(lambda: from_matrix(value))
    if found is not None:
        mixes(found)
