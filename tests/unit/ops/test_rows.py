"""All rows at once are bit for bit the rows one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpc_oldsgd import ops
from hpc_oldsgd.ops import reference
from support.mix_inputs import PAIR_NAMES, PAIRS, Wrapped, same

Graph = tuple[Tensor, Tensor, Tensor, Tensor]


def graph(n: int) -> Graph:
    """indptr, indices, own weights, weights: row i has i mod 4 neighbours, the last one n - 1."""
    rng = np.random.default_rng(n)
    rows = [rng.permutation(np.delete(np.arange(n), i))[: i % 4].tolist() for i in range(n)]
    if n > 4:
        rows[-1] = list(range(n - 1))
    indptr = np.cumsum([0, *map(len, rows)])
    indices = [j for row in rows for j in row]
    return (
        torch.from_numpy(indptr.astype(np.int64)),
        torch.tensor(indices, dtype=torch.int64),
        torch.from_numpy(rng.random(n)),
        torch.from_numpy(rng.random(len(indices))),
    )


def matrices(n: int, d: int, model: torch.dtype, wire: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(n + d)
    x, y, acc = (torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(3))
    return x.to(model), y.to(wire), acc.to(model)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("model", "wire"), PAIRS, ids=PAIR_NAMES)
def test_rows_are_the_single_op(model: torch.dtype, wire: torch.dtype, native: bool) -> None:
    if native and not ops.native_available():
        pytest.skip("the extension is not built")
    for n, d in ((1, 5), (2, 16), (3, 1), (9, 1003), (6, 5000), (4, 0)):
        x, y, acc = matrices(n, d, model, wire)
        indptr, indices, own, weights = graph(n)
        out, moved = torch.empty_like(x), x.clone()
        d2 = torch.empty(n, dtype=torch.float64)
        if native:
            ops.mix_rows(out, y, indptr, indices, own, weights, acc, 0.3)
            found = ops.mix_rows_delta(moved, y, indptr, indices, weights, distance=True)
            assert found is not None
            d2 = found
        else:
            reference.mix_rows(out, y, (indptr, indices, own, weights), acc, 0.3)
            reference.mix_rows_delta(moved, y, (indptr, indices, weights), d2)
        for i in range(n):
            at = slice(int(indptr[i]), int(indptr[i + 1]))
            near = [y[j] for j in indices[at].tolist()]
            w = [own[i].item(), *weights[at].tolist()]
            row = torch.empty_like(x[i])
            ops.fused_mix(row, y[i], near, w, acc[i], 0.3)
            assert same(out[i], row)
            row = x[i].clone()
            e = ops.fused_mix_delta(row, y[i], near, w, distance=True)
            assert e is not None and same(moved[i], row)
            assert d2[i].item() == (e.item() if native else pytest.approx(e.item(), rel=1e-12))


def test_without_acc() -> None:
    x, y, _ = matrices(5, 33, torch.float32, torch.float32)
    indptr, indices, own, weights = graph(5)
    ops.mix_rows(x, y, indptr, indices, own, weights)
    w = torch.zeros(5, 5, dtype=torch.float64)
    for i in range(5):
        w[i, i] = own[i]
        for k in range(int(indptr[i]), int(indptr[i + 1])):
            w[i, indices[k]] += weights[k]
    torch.testing.assert_close(x.double(), w @ y.double(), rtol=1e-6, atol=1e-6)


def test_threads_change_no_bit() -> None:
    x, y, _ = matrices(64, 5001, torch.float32, torch.float32)
    indptr, indices, _, weights = graph(64)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        moved = x.clone()
        d2 = ops.mix_rows_delta(moved, y, indptr, indices, weights, distance=True)
        assert d2 is not None
        results.append((moved, d2))
    for moved, d2 in results[1:]:
        assert same(moved, results[0][0]) and same(d2, results[0][1])


def test_mixes_a_view_of_the_mean_to_itself() -> None:
    """A doubly stochastic W keeps the mean: a ring of 1024 agents, as a simulation has it."""
    n, d = 1024, 100
    i = torch.arange(n)
    indices = torch.stack([(i - 1) % n, (i + 1) % n], 1).flatten()
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = x.mean(0)
    for _ in range(50):
        ops.mix_rows_delta(
            x,
            x.clone(),
            torch.arange(0, 2 * n + 1, 2),
            indices,
            torch.full((2 * n,), 1 / 3).double(),
        )
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("must not share memory", {"y": "x"}),
        ("indices must lie in 0..2", {"indices": torch.tensor([0, 1, 3])}),
        ("indices must lie in 0..2", {"indices": torch.tensor([0, -1, 2])}),
        ("indptr must rise", {"indptr": torch.tensor([0, 2, 1, 3])}),
        ("indptr must rise", {"indptr": torch.tensor([0, 1, 1, 2])}),
        ("indptr is 3 x torch.int64", {"indptr": torch.tensor([0, 1, 3])}),
        ("indices is 3 x torch.int32", {"indices": torch.tensor([0, 1, 2], dtype=torch.int32)}),
        ("weights is 3 x torch.float32", {"weights": torch.ones(3)}),
        (r"must all be \(n, d\)", {"y": torch.ones(4, 2)}),
        ("nor narrower", {"y": torch.ones(3, 2, dtype=torch.float64)}),
        ("y is not contiguous", {"y": torch.ones(2, 3).t()}),
        ("y has no memory of its own", {"y": Wrapped(torch.ones(3, 2))}),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(message: str, change: dict[str, object]) -> None:
    x = torch.ones(3, 2)
    arguments = {
        "x": x,
        "y": torch.ones(3, 2),
        "indptr": torch.tensor([0, 1, 2, 3]),
        "indices": torch.tensor([1, 2, 0]),
        "weights": torch.ones(3, dtype=torch.float64),
    } | {k: x if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        ops.mix_rows_delta(**arguments)  # type: ignore[arg-type]
    assert torch.equal(x, torch.ones(3, 2))
