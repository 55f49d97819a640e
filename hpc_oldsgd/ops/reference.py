"""The mixing op in plain torch: what the native code matches bit for bit, and the fallback.

A product is rounded before it is added: `add_(y * w)`, never `add_(y, alpha=w)`, which torch may
contract to a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks


def accumulator(model: torch.dtype) -> torch.dtype:
    return torch.float64 if model == torch.float64 else torch.float32


def mix(
    out: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    acc: Tensor | None,
    alpha: float,
    y_next: Tensor | None,
    zero_acc: bool,
) -> None:
    a = accumulator(out.dtype)
    with torch.no_grad():
        s = y_self.reshape(-1).to(a) * weights[0]
        for w, y in zip(weights[1:], neighbours, strict=True):
            s.add_(y.reshape(-1).to(a) * w)
        if acc is not None:
            s.sub_(acc.reshape(-1).to(a) * alpha)
        _write(out, s, y_next)
        if acc is not None and zero_acc:
            acc.zero_()


def mix_delta(
    x: Tensor,
    y_self: Tensor,
    neighbours: Sequence[Tensor],
    weights: Sequence[float],
    y_next: Tensor | None,
    distance: Tensor | None,
) -> None:
    a = accumulator(x.dtype)
    with torch.no_grad():
        y_i = y_self.reshape(-1).to(a)
        s, e = torch.zeros_like(y_i), torch.zeros_like(y_i)
        for w, y in zip(weights[1:], neighbours, strict=True):
            delta = y.reshape(-1).to(a) - y_i
            s.add_(delta * w)
            if distance is not None:
                e.add_((delta * delta) * w)
        if distance is not None:
            distance.copy_(e.sum(dtype=torch.float64))
        _write(x, x.reshape(-1).to(a) + s, y_next)


def mix_rows(
    out: Tensor, y: Tensor, graph: Sequence[Tensor], acc: Tensor | None, alpha: float
) -> None:
    indptr, indices, self_weights, weights = _on_device_of(out, graph)
    a = accumulator(out.dtype)
    with torch.no_grad():
        s = y.to(a) * _column(self_weights, a)
        for rows, others, w in _by_position(indptr, indices, weights):
            s[rows] += y[others].to(a) * _column(w, a)
        if acc is not None:
            s.sub_(acc.to(a) * alpha)
        out.copy_(s)


def mix_rows_delta(x: Tensor, y: Tensor, graph: Sequence[Tensor], distance: Tensor | None) -> None:
    indptr, indices, weights = _on_device_of(x, graph)
    a = accumulator(x.dtype)
    with torch.no_grad():
        s = torch.zeros_like(x, dtype=a)
        e = torch.zeros_like(s) if distance is not None else None
        for rows, others, w in _by_position(indptr, indices, weights):
            delta = y[others].to(a) - y[rows].to(a)
            s[rows] += delta * _column(w, a)
            if e is not None:
                e[rows] += (delta * delta) * _column(w, a)
        if e is not None and distance is not None:
            distance.copy_(e.sum(dim=1, dtype=torch.float64))
        x.copy_(x.to(a) + s)


def _write(x: Tensor, s: Tensor, y_next: Tensor | None) -> None:
    x.copy_(s.view_as(x))
    if y_next is not None:
        y_next.copy_(x.view_as(y_next))


def _on_device_of(x: Tensor, graph: Sequence[Tensor]) -> list[Tensor]:
    checks.graph(x.shape[0], graph[0], graph[1])
    return [t.to(x.device) for t in graph]


def _column(w: Tensor, dtype: torch.dtype) -> Tensor:
    return w.to(dtype).unsqueeze(1)


def _by_position(
    indptr: Tensor, indices: Tensor, weights: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(rows, their k-th neighbours, the weights) for k = 0, 1, ...: each row keeps its order."""
    degrees = indptr[1:] - indptr[:-1]
    steps = []
    for k in range(int(degrees.max()) if degrees.numel() else 0):
        rows = (degrees > k).nonzero().flatten()
        at = indptr[rows] + k
        steps.append((rows, indices[at], weights[at]))
    return steps
