"""csrc/narrow.cu without a GPU: run on the host through a shim, and read as PTX."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_oldsgd import ops
from hpc_oldsgd.ops import narrow_reference as reference
from hpc_oldsgd.ops import native
from support import cuda_build, mix_inputs, narrow_inputs
from support.bits import same
from support.mix_inputs import TYPES
from support.narrow_inputs import Narrow

KERNELS = len(TYPES) * 2 * 4  # decode, encode, mix, mix with distance
widths = pytest.mark.parametrize("bits", [8, 4])
models = pytest.mark.parametrize("model", TYPES, ids=lambda t: str(t).removeprefix("torch."))


class Shim:
    """csrc/narrow.cu as g++ compiles it over the shim; TYPES has the order of Dtype of mix.h."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.fixed_degree = ctypes.c_int.in_dll(library, "fixed_degree").value
        doubles = ctypes.c_int.in_dll(library, "scratch_doubles").value
        self.scratch = torch.zeros(doubles, dtype=torch.float64)  # every kernel leaves it as it was
        p, i64, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.narrow, self.rows = library.shim_narrow, library.shim_rows
        self.narrow.argtypes = [i, i, i64, p, p, p, p, p, i64, p, p, p, p]
        self.rows.argtypes = [i, i, *[i64] * 5, p, p, p]
        self.narrow.restype = self.rows.restype = ctypes.c_char_p

    def mix(self, c: Narrow, *, snapshot: bool, distance: bool) -> float | None:
        to, of = [z.data_ptr() for z in c.copies], [q.data_ptr() for q in c.messages]
        degree = len(to)
        pointers = ctypes.c_void_p * degree
        weights = (ctypes.c_double * (degree + 1))(*c.weights)
        table = None
        if degree > self.fixed_degree:
            table = native.address_table([*to, *of], c.weights)
        d2 = torch.full((), -1.0, dtype=torch.float64)
        error = self.narrow(
            *(TYPES.index(c.x.dtype), c.bits, c.x.numel(), c.x.data_ptr(), c.z.data_ptr()),
            *(pointers(*to), pointers(*of), weights, degree),
            *(c.next.data_ptr() if snapshot else None, d2.data_ptr() if distance else None),
            *(None if table is None else table.data_ptr(), self.scratch.data_ptr()),
        )
        assert error is None, error
        return d2.item() if distance else None

    def by_rows(self, x: Tensor | None, z: Tensor, message: Tensor, bits: int) -> None:
        error = self.rows(
            *(TYPES.index(z.dtype), bits, *z.shape, 0 if x is None else x.stride(0)),
            *(z.stride(0), message.stride(0), None if x is None else x.data_ptr()),
            *(z.data_ptr(), message.data_ptr()),
        )
        assert error is None, error


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(cuda_build.for_the_host("narrow_shim.cpp", tmp_path_factory.mktemp("shim")))


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_build.to_ptx("narrow.cu", tmp_path_factory.mktemp("ptx"))


def check(shim: Shim, c: Narrow, offset: int = 0) -> None:
    for snapshot in (False, True):
        a, b = c.moved(offset), c.copy()
        found = shim.mix(a, snapshot=snapshot, distance=snapshot)
        d2 = torch.empty((), dtype=torch.float64) if snapshot else None
        q = b.next if snapshot else None
        reference.mix_narrow(b.x, b.z, b.copies, b.messages, b.weights, b.bits, q, d2)
        assert all(map(same, a.tensors(), b.tensors()))
        assert found == (d2 if d2 is None else pytest.approx(d2.item(), rel=1e-12))


@widths
@models
def test_kernel_on_the_host(shim: Shim, model: torch.dtype, bits: int) -> None:
    for n in (0, 1, 7, 64, 1003):
        for degree in (0, 1, 2, 5):
            check(shim, narrow_inputs.case(model, bits, n, degree))
    check(shim, narrow_inputs.case(model, bits, 333, 2), offset=1)  # nothing is aligned
    check(shim, narrow_inputs.case(model, bits, 130, shim.fixed_degree))
    check(shim, narrow_inputs.case(model, bits, 130, shim.fixed_degree + 2))


def test_grid_stride(shim: Shim) -> None:
    check(shim, narrow_inputs.case(torch.float32, 4, 50_003, 2))


@widths
@models
def test_special_values_and_rows(shim: Shim, model: torch.dtype, bits: int) -> None:
    some = mix_inputs.special(model)
    x = torch.stack([some.repeat(4), some[some.isfinite()].repeat(9)[: 4 * some.numel()]])
    z = x.roll(5, 1).contiguous()
    message = torch.full((2, ops.message_bytes(x.shape[1], bits)), 0xAB, dtype=torch.uint8)
    found, expected, sent = z.clone(), z.clone(), message.clone()
    shim.by_rows(x, found, sent, bits)
    reference.encode(x, expected, message, bits)
    assert torch.equal(sent, message) and same(found, expected)
    shim.by_rows(None, z, message, bits)
    assert same(z, expected)


def test_a_missing_table_is_refused(shim: Shim) -> None:
    c = narrow_inputs.case(torch.float32, 8, 8, shim.fixed_degree + 1)
    degree = len(c.copies)
    none = (ctypes.c_void_p * degree)()
    error = shim.narrow(
        *(1, 8, 8, c.x.data_ptr(), c.z.data_ptr(), none, none),
        *((ctypes.c_double * (degree + 1))(), degree, None, None, None, None),
    )
    assert error is not None and b"table is missing" in error


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_no_spills(ptx: Path, arch: str, tmp_path: Path) -> None:
    spills = cuda_build.spills(ptx, arch, tmp_path)
    assert len(spills) == KERNELS
    assert set(spills) == {("0", "0")}


def test_loads_and_stores_are_128_bits_wide(ptx: Path) -> None:
    kernels = cuda_build.kernels(ptx)
    assert len(kernels) == KERNELS
    for kernel in kernels:  # at least z, which every pass reads and writes
        assert re.search("ld" + cuda_build.WIDE, kernel)
        assert re.search("st" + cuda_build.WIDE, kernel)


def test_no_fused_multiply_add(ptx: Path) -> None:
    assert not re.search(r"\bfma\.", ptx.read_text())
