"""The mixing op against what torch and numpy can compose, and against the memory itself.

The limit of an op is the bytes it must move (each input read once, each output written once) at
the speed of the best copy of this run, normally the one with non-temporal stores. All candidates
take turns in every repeat, so that a disturbance of the machine meets all of them. Their order
changes each time: the one after a plain store also pays for writing its cache lines back.

Over int8 and int4 (the difference wire) a pass also decodes what arrived and updates the copies
("mix"), and writes the next message ("round"); mix_narrow.py has these.

Each other form is timed bare, and as an agent calls it at the end of a round: with the sum of
gradients, which is emptied (gradient form), and the next snapshot written on the way. All do the
same work.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..cli.fields import at_least
from ..errors import UserError
from ..runtime.wire import wire_type
from .mix_narrow import NarrowBuffers

ALPHA = 0.01
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Options:
    """The fused mixing op against torch, torch.compile, numpy and the machine's best copy."""

    elements: tuple[int, ...] = (10_000_000, 124_000_000)
    """Lengths of the model; GPT-2 small has 124 million parameters."""
    degree: int = 2
    """Neighbours; 2 is a ring."""
    dtype: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """Type of the model."""
    wire: tuple[Literal["fp32", "fp64", "bf16", "fp16", "int8", "int4"], ...] = ()
    """Types of what travels, one table each; the model's own if not given."""
    threads: tuple[int, ...] = ()
    """Numbers of threads; default one, then all."""
    repeats: int = 9
    """Turns of each candidate; medians count."""
    compile: bool = True
    """Let torch.compile take part; it needs a C++ compiler."""
    json: bool = False
    """Print the results as JSON in the last line."""


def types(options: Options, wire: str) -> tuple[torch.dtype, torch.dtype]:
    """The model's, and the wire's, which must be the same or narrower."""
    model = wire_type(options.dtype, torch.float64)
    assert isinstance(model, torch.dtype)
    chosen = wire_type(None if wire in BITS else wire or None, model) or model
    assert isinstance(chosen, torch.dtype)
    return model, chosen


@dataclass
class Candidate:
    name: str
    form: str
    streams_bytes: int  # what the op must move
    call: Callable[[], Any]
    seconds: list[float]

    @property
    def median_s(self) -> float:
        return median(self.seconds)


class Buffers:
    """The buffers all candidates share, and the candidates."""

    def __init__(self, options: Options, wire_name: str, n: int) -> None:
        model, wire = types(options, wire_name)
        self.w = [1.0 / (options.degree + 1)] * (options.degree + 1)
        self.x = torch.randn(n).to(model)
        self.y = torch.randn(n).to(wire)
        self.neighbours = [torch.randn(n).to(wire) for _ in range(options.degree)]
        self.out = torch.empty(n, dtype=model)
        self.acc = torch.zeros(n, dtype=model)
        self.wires = (options.degree + 1) * n * wire.itemsize
        self.models = n * model.itemsize

    def candidates(self, options: Options) -> list[Candidate]:
        x, y, out, acc, near, w = self.x, self.y, self.out, self.acc, self.neighbours, self.w
        snapshot = self.wires // len(w)
        gradient, delta = self.wires + self.models, self.wires + 2 * self.models
        bytes_of = {
            "gradient": gradient,
            "delta": delta,
            "gradient, round": gradient + 2 * self.models + snapshot,
            "delta, round": delta + snapshot,
        }
        grad = lambda: ops.fused_mix(out, y, near, w, acc, ALPHA, y_next=y, zero_acc=True)  # noqa: E731
        calls: list[tuple[str, str, Callable[[], Any]]] = [
            ("ours", "gradient", lambda: ops.fused_mix(out, y, near, w)),
            ("ours", "delta", lambda: ops.fused_mix_delta(x, y, near, w)),
            ("ours", "gradient, round", grad),
            ("ours", "delta, round", lambda: ops.fused_mix_delta(x, y, near, w, y_next=y)),
            ("torch eager", "gradient", lambda: eager(y, near, w)),
        ]
        ways: list[tuple[str, Callable[[Any], Any]]] = [("torch in-place", lambda f: f)]
        chains = [(in_place, in_place_delta, in_place_round, in_place_delta_round)]
        if options.compile:
            ways.append(("torch.compile", torch.compile))
            chains.append((compiled, compiled_delta, compiled_round, compiled_delta_round))
        for (name, way), chain in zip(ways, chains, strict=True):
            mix, mix_delta, mix_round, delta_round = map(way, chain)
            calls += [
                (name, "gradient", partial(mix, out, y, near, w)),
                (name, "delta", partial(mix_delta, x, y, near, w)),
                (name, "gradient, round", partial(mix_round, out, y, near, w, acc)),
                (name, "delta, round", partial(delta_round, x, y, near, w)),
            ]
        found = [(name, form, bytes_of[form], call) for name, form, call in calls]
        if out.is_cpu and torch.bfloat16 not in (out.dtype, y.dtype):
            np_out, np_y, *np_near = (t.numpy() for t in (out, y, *near))
            spare = np.empty_like(np_out)
            call = lambda: numpy_chain(np_out, np_y, np_near, w, spare)  # noqa: E731
            found.append(("numpy", "gradient", gradient, call))
        return [Candidate(*each, seconds=[]) for each in found]


def copies(a: Tensor, b: Tensor) -> list[Candidate]:
    found: list[tuple[str, Callable[[], Any]]] = [("copy, torch", lambda: b.copy_(a))]
    if ops.native_available():
        found.append(("copy, streaming", lambda: ops.stream_copy(b, a)))
    size = 2 * a.numel() * a.element_size()
    return [Candidate(name, "copy", size, call, seconds=[]) for name, call in found]


def candidates(options: Options, wire: str, n: int) -> tuple[list[Candidate], list[Candidate]]:
    """The copies, and the rest."""
    if wire not in BITS:
        buffers = Buffers(options, wire, n)
        return copies(buffers.x, buffers.out), buffers.candidates(options)
    narrow = NarrowBuffers(types(options, wire)[0], BITS[wire], options.degree, n)
    calls = narrow.calls(options.compile)
    return copies(narrow.x, narrow.out), [Candidate(*call, seconds=[]) for call in calls]


def eager(y: Tensor, near: list[Tensor], w: list[float]) -> Tensor:
    out = w[0] * y
    for w_j, y_j in zip(w[1:], near, strict=True):
        out = out + w_j * y_j
    return out


def in_place(out: Tensor, y: Tensor, near: list[Tensor], w: list[float]) -> None:
    torch.mul(y, w[0], out=out)
    for w_j, y_j in zip(w[1:], near, strict=True):
        out.add_(y_j, alpha=w_j)


def in_place_delta(x: Tensor, y: Tensor, near: list[Tensor], w: list[float]) -> None:
    x.sub_(y, alpha=sum(w[1:]))
    for w_j, y_j in zip(w[1:], near, strict=True):
        x.add_(y_j, alpha=w_j)


def compiled(out: Tensor, y: Tensor, near: list[Tensor], w: list[float]) -> None:
    out.copy_(eager(y, near, w))


def compiled_delta(x: Tensor, y: Tensor, near: list[Tensor], w: list[float]) -> None:
    s = torch.zeros_like(y)
    for w_j, y_j in zip(w[1:], near, strict=True):
        s = s + w_j * (y_j - y)
    x.add_(s)


def in_place_round(out: Tensor, y: Tensor, near: list[Tensor], w: list[float], acc: Tensor) -> None:
    in_place(out, y, near, w)
    out.add_(acc, alpha=-ALPHA)
    acc.zero_()
    y.copy_(out)


def in_place_delta_round(x: Tensor, y: Tensor, near: list[Tensor], w: list[float]) -> None:
    in_place_delta(x, y, near, w)
    y.copy_(x)


def compiled_round(out: Tensor, y: Tensor, near: list[Tensor], w: list[float], acc: Tensor) -> None:
    out.copy_(eager(y, near, w) - ALPHA * acc)
    acc.zero_()
    y.copy_(out)


def compiled_delta_round(x: Tensor, y: Tensor, near: list[Tensor], w: list[float]) -> None:
    compiled_delta(x, y, near, w)
    y.copy_(x)


def numpy_chain(out: Any, y: Any, near: list[Any], w: list[float], spare: Any) -> None:
    np.multiply(y, out.dtype.type(w[0]), out=out)
    for w_j, y_j in zip(w[1:], near, strict=True):
        np.multiply(y_j, out.dtype.type(w_j), out=spare)
        np.add(out, spare, out=out)


def measure(options: Options, wire: str, n: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    copied, found = candidates(options, wire, n)
    everyone = copied + found
    for c in everyone:  # compiles, touches pages, starts threads
        c.call()
        c.call()
    order = random.Random(0)
    for _ in range(options.repeats):
        for c in order.sample(everyone, len(everyone)):
            begin = time.perf_counter()
            c.call()
            c.seconds.append(time.perf_counter() - begin)
    best_copy = min(copied, key=lambda c: c.median_s)
    rate = best_copy.streams_bytes / best_copy.median_s
    rows = [_row(c, rate, [o for o in found if o.form == c.form]) for c in copied + found]
    return {
        "elements": n,
        "wire": wire or options.dtype,
        "threads": threads,
        "copy_gb_s": rate / 1e9,
        "rows": rows,
    }


def _row(c: Candidate, rate: float, others: list[Candidate]) -> dict[str, Any]:
    return {
        "name": c.name,
        "form": c.form,
        "ms": 1e3 * c.median_s,
        "gb_s": c.streams_bytes / c.median_s / 1e9,
        "of_limit": c.streams_bytes / rate / c.median_s,
        **{
            f"times_{key}": other.median_s / c.median_s
            for key in ("torch in-place", "torch.compile")
            for other in others
            if other.name == key
        },
    }


def table(result: dict[str, Any], options: Options) -> str:
    wire = f" over {result['wire']}" if result["wire"] != options.dtype else ""
    lines = [
        f"{result['elements']:,} x {options.dtype}{wire}, degree {options.degree}, "
        f"{result['threads']} thread(s), best copy {result['copy_gb_s']:.1f} GB/s",
        f"  {'':32}{'ms':>9}{'GB/s':>8}{'of limit':>10}{'x in-place':>12}{'x compile':>12}",
    ]
    for row in result["rows"]:
        name = row["name"] if row["form"] == "copy" else f"{row['name']}: {row['form']}"
        cells = [row.get(f"times_{key}") for key in ("torch in-place", "torch.compile")]
        ratios = "".join(f"{'' if c is None else f'{c:.2f}':>12}" for c in cells)
        lines.append(
            f"  {name:32}{row['ms']:9.2f}{row['gb_s']:8.1f}{row['of_limit']:10.2f}{ratios}"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    at_least(1, options, "elements", "repeats", "threads")
    at_least(0, options, "degree")
    if not options.elements:
        raise UserError("--elements must be one or more numbers.")
    wires: tuple[str, ...] = options.wire or ("",)
    for wire in wires:
        types(options, wire)
    threads = options.threads or tuple(sorted({1, torch.get_num_threads()}))
    results = []
    for n, wire, t in itertools.product(options.elements, wires, threads):
        results.append(measure(options, wire, n, t))
        print(table(results[-1], options), end="\n\n", flush=True)
    if options.json:
        print(json.dumps({"build": ops.build_info(), "torch": torch.__version__, "mix": results}))
