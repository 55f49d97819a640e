"""The difference wire as a user meets it: errors, torch.compile, fakes, wrapped tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_oldsgd import ops
from hpc_oldsgd.ops import narrow
from support import narrow_inputs
from support.bits import same
from support.mix_inputs import Wrapped

N = 70
BYTES = ops.message_bytes(N, 8)
native = pytest.mark.skipif(not ops.native_available(), reason="the extension is not built")


def t(n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(n, dtype=dtype)


def message(n: int = BYTES) -> Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def shared() -> dict[str, Any]:
    memory = t(2 * N)
    return {"x": memory[:N], "z_self": memory[N // 2 : N // 2 + N]}


def overlapping() -> dict[str, Any]:
    memory = message(2 * BYTES)
    return {"messages": [memory[:BYTES]], "next_message": memory[1 : BYTES + 1]}


BAD: dict[str, Callable[[], dict[str, Any]]] = {
    "has 8 or 4 bits, not 2": lambda: {"bits": 2},
    "1 copies, 0 messages and 2 weights": lambda: {"messages": []},
    "1 copies, 1 messages and 1 weights": lambda: {"weights": [1.0]},
    "weights must be a list of real numbers": lambda: {"weights": [0.5, 1j]},
    "a message is 75 x torch.uint8": lambda: {"messages": [message(75)]},
    "a message is 76 x torch.int8": lambda: {"messages": [message().to(torch.int8)]},
    "next_message is 75": lambda: {"next_message": message(75)},
    "z_self is 70 x torch.float64": lambda: {"z_self": t(dtype=torch.float64)},
    "a copy is 69": lambda: {"copies": [t(69)]},
    "a copy is not contiguous": lambda: {"copies": [t(2 * N)[::2]]},
    "Cannot mix torch.int32": lambda: {"x": t(dtype=torch.int32)},
    "x requires grad": lambda: {"x": t().requires_grad_()},
    "z_self and x must not share": shared,
    "next_message partly overlaps a message": overlapping,
    "takes torch tensors, not ndarray": lambda: {"z_self": t().numpy()},
    "have different shapes": lambda: {"x": t().view(7, 10), "z_self": t().view(10, 7)},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_input_is_named_and_nothing_is_written(said: str) -> None:
    arguments: dict[str, Any] = {
        "x": t(),
        "z_self": t(),
        "copies": [t()],
        "messages": [message()],
        "weights": [0.5, 0.5],
        "bits": 8,
        "next_message": message(),
    }
    arguments |= BAD[said]()
    flat = [*arguments.values(), *arguments["copies"], *arguments["messages"]]
    buffers = [a for a in flat if isinstance(a, Tensor)]
    before = [b.detach().clone() for b in buffers]
    with pytest.raises(ValueError, match=said):
        ops.fused_mix_narrow(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))


BAD_ROWS: dict[str, tuple[Tensor, Tensor, Tensor]] = {
    r"z is \(2, 69\), expected \(2, 70\)": (t(140).view(2, N), t(138).view(2, 69), message()),
    r"message is \(1, 75\), expected \(1, 76\)": (t(), t(), message(75)),
    "z is not contiguous": (t(), t(2 * N)[::2], message()),
    "z is 70 x torch.float16": (t(), t(dtype=torch.float16), message()),
    r"x is \(2, 70\), expected .* each row without gaps": (
        torch.ones(2, 2 * N)[:, ::2],
        t(140).view(2, N),
        message(),
    ),
    "The rows of z overlap": (t(140).view(2, N), t().expand(2, N), message()),
    "z requires grad": (t(), t().requires_grad_(), message()),
}


@pytest.mark.parametrize("said", BAD_ROWS)
def test_bad_rows_are_named(said: str) -> None:
    x, z, q = BAD_ROWS[said]
    if x.dim() == 2:
        q = torch.zeros(2, BYTES, dtype=torch.uint8)
    with pytest.raises(ValueError, match=said):
        ops.encode(x, z, q, 8)
    assert not q.any()
    if said.startswith(("message", "The rows", "z requires", "z is not")):
        with pytest.raises(ValueError, match=said):
            ops.decode_add(z, q, 8)


def test_x_and_z_must_be_apart() -> None:
    x = t()
    with pytest.raises(ValueError, match="z and x must not share memory"):
        ops.encode(x, x, message(), 8)


def test_a_flat_message_takes_any_shape() -> None:
    x, z, q = torch.randn(7, 10), torch.zeros(70), message()
    ops.encode(x, z, q, 8)
    assert torch.allclose(z.view(7, 10), x, atol=0.03)


def test_a_write_is_seen_by_the_version() -> None:
    c = narrow_inputs.case(torch.float32, 8, N, 1)
    everything = [*c.tensors(), *c.messages]
    before = [v._version for v in everything]
    ops.fused_mix_narrow(c.x, c.z, c.copies, c.messages, c.weights, 8)
    changed = [v._version > b for v, b in zip(everything, before, strict=True)]
    assert changed == [True, False, True, False, False]
    ops.fused_mix_narrow(c.x, c.z, c.copies, c.messages, c.weights, 8, next_message=c.next)
    changed = [v._version > b for v, b in zip(everything, before, strict=True)]
    assert changed == [True, True, True, True, False]


def test_opcheck() -> None:
    c = narrow_inputs.case(torch.float32, 4, N, 2)
    d2 = torch.empty((), dtype=torch.float64)
    found = torch.ops.hpc_oldsgd
    arguments = (c.x, c.z, c.copies, c.messages, c.weights, 4, c.next, d2)
    if narrow.COMPILES_LISTS:
        torch.library.opcheck(found.fused_mix_narrow.default, arguments)
    torch.library.opcheck(found.encode.default, (c.x, c.z, c.next, 4))
    torch.library.opcheck(found.decode_add.default, (c.z, c.next, 4))


@pytest.mark.parametrize("lists", sorted({narrow.COMPILES_LISTS, False}))
def test_compiled(lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as torch 2.4 must do it."""
    monkeypatch.setattr(narrow, "COMPILES_LISTS", lists)
    torch.compiler.reset()

    def step(c: narrow_inputs.Narrow) -> Tensor:
        d2 = ops.fused_mix_narrow(
            c.x, c.z, c.copies, c.messages, c.weights, 4, next_message=c.next, distance=True
        )
        ops.decode_add(c.copies[0], c.next, 4)
        ops.encode(c.x, c.copies[1], c.next, 4)
        assert d2 is not None
        return d2 * 2

    c = narrow_inputs.case(torch.bfloat16, 4, 1003, 2)
    a, b = c.copy(), c.copy()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(a)
    assert same(found, step(b)) and all(map(same, a.tensors(), b.tensors()))


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call() -> Tensor | None:
        x, z, y, q = torch.empty(N), torch.empty(N), torch.empty(N), message()
        ops.encode(x, z, q, 8)
        ops.decode_add(z, q, 8)
        return ops.fused_mix_narrow(x, z, [y], [q], [0.5, 0.5], 8, distance=True)

    with FakeTensorMode():
        d2 = call()
        assert d2 is not None and d2.shape == () and d2.dtype == torch.float64
    with torch.device("meta"):
        d2 = call()
        assert d2 is not None and d2.is_meta


def test_tensors_without_memory_of_their_own() -> None:
    c = narrow_inputs.case(torch.float32, 8, N, 1)
    a, b = c.copy(), c.copy()
    ops.fused_mix_narrow(a.x, a.z, a.copies, a.messages, a.weights, 8, next_message=a.next)
    ops.fused_mix_narrow(
        Wrapped(b.x), b.z, [Wrapped(b.copies[0])], b.messages, b.weights, 8, next_message=b.next
    )
    assert all(map(same, a.tensors(), b.tensors()))


def test_without_the_extension_it_works() -> None:
    code = """if True:
        import warnings, torch
        warnings.simplefilter("ignore")
        from hpc_oldsgd import ops
        x, z, q = torch.arange(5.0), torch.zeros(5), torch.zeros(10, dtype=torch.uint8)
        ops.encode(x, z, q, 8)
        print(ops.native_available(), q.tolist())"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HPC_OLDSGD_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    x, z, q = torch.arange(5.0), torch.zeros(5), torch.zeros(10, dtype=torch.uint8)
    ops.encode(x, z, q, 8)
    assert ran.stdout == f"False {q.tolist()}\n"


@native
def test_the_extension_counts_the_same_bytes() -> None:
    from hpc_oldsgd.ops.native import extension

    for d in (*range(140), 4096, 10_000_019):
        for bits in (8, 4):
            assert extension.message_bytes(d, bits) == ops.message_bytes(d, bits)
