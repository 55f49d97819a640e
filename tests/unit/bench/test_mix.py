"""`bench mix`: every candidate does the same work, over every wire."""

from __future__ import annotations

import json

import pytest
import torch

from hpc_oldsgd import ops
from hpc_oldsgd.bench import mix
from hpc_oldsgd.bench.mix_narrow import NarrowBuffers, parts
from hpc_oldsgd.errors import UserError


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n", [1003, 640])
def test_the_chain_of_torch_does_what_the_pass_does(bits: int, n: int) -> None:
    torch.manual_seed(0)
    a = NarrowBuffers(torch.float32, bits, 2, n)
    torch.manual_seed(0)
    b = NarrowBuffers(torch.float32, bits, 2, n)
    for buffers, name in ((a, "ours"), (b, "torch in-place")):
        for who, form, _, call in buffers.calls(compile=False):
            if who == name and form == "round":
                call()
    codes, _ = parts(a.next.whole, n, bits)
    assert codes.any()
    for ours, theirs in ((a.x, b.x), (a.z, b.z), *zip(a.copies, b.copies, strict=True)):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert (codes != b.next.codes).float().mean() < 0.01  # ties may fall the other way


def test_a_table_for_each_wire(capsys: pytest.CaptureFixture[str]) -> None:
    mix.main(
        mix.Options(
            elements=(1000,),
            wire=("bf16", "int8", "int4"),
            threads=(1,),
            repeats=1,
            compile=False,
            json=True,
        )
    )
    said = capsys.readouterr().out
    assert [f"over {wire}" in said for wire in ("bf16", "int8", "int4")] == [True] * 3
    results = json.loads(said.splitlines()[-1])["mix"]
    assert [r["wire"] for r in results] == ["bf16", "int8", "int4"]
    rows = {(r["name"], r["form"]): r for r in results[2]["rows"]}
    must_move = (4 * 8 + 3 * ops.message_bytes(1000, 4) / 1000) * 1000
    ours = rows["ours", "round"]
    assert ours["gb_s"] * ours["ms"] * 1e6 == pytest.approx(must_move, rel=1e-6)


def test_a_wider_wire_is_refused() -> None:
    with pytest.raises(UserError, match="not narrower"):
        mix.main(mix.Options(elements=(10,), dtype="bf16", wire=("int8", "fp32")))
