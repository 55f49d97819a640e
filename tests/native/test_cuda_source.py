"""csrc/mix.cu without a GPU: run on the host through a shim, and read as PTX."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_oldsgd.ops import native, reference
from support import cuda_build, mix_inputs
from support.bits import same
from support.mix_inputs import PAIR_NAMES, PAIRS, TYPES, Case

GRADIENT, DELTA = 0, 1  # as Form of mix.h counts; TYPES has the order of its Dtype
KERNELS = 3 * len(PAIRS)  # gradient, delta, delta with distance
pairs = pytest.mark.parametrize(("model", "wire"), PAIRS, ids=PAIR_NAMES)


class Shim:
    """csrc/mix.cu as g++ compiles it over the shim."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.fixed_degree = ctypes.c_int.in_dll(library, "fixed_degree").value
        doubles = ctypes.c_int.in_dll(library, "scratch_doubles").value
        self.scratch = torch.zeros(doubles, dtype=torch.float64)  # every kernel leaves it as it was
        p, i64, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self.mix = library.shim_mix
        self.mix.argtypes = [ctypes.c_int] * 3 + [i64, p, p, p, p, i64, p, double, ctypes.c_bool]
        self.mix.argtypes += [p] * 4
        self.mix.restype = ctypes.c_char_p


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(cuda_build.for_the_host("mix_shim.cpp", tmp_path_factory.mktemp("shim")))


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_build.to_ptx("mix.cu", tmp_path_factory.mktemp("ptx"))


def run(
    shim: Shim, form: int, c: Case, *, snapshot: bool, zero: bool = False, distance: bool = False
) -> float | None:
    addresses = [v.data_ptr() for v in c.neighbours]
    degree = len(addresses)
    list_of = (ctypes.c_void_p * degree)(*addresses)
    weights = (ctypes.c_double * (degree + 1))(*c.weights)
    table = native.address_table(addresses, c.weights) if degree > shim.fixed_degree else None
    d2 = torch.full((), -1.0, dtype=torch.float64)
    error = shim.mix(
        *(form, TYPES.index(c.x.dtype), TYPES.index(c.y.dtype), c.x.numel()),
        *(c.x.data_ptr(), c.y.data_ptr(), list_of, weights, degree),
        *(c.acc.data_ptr() if form == GRADIENT else None, c.alpha),
        *(zero, c.y.data_ptr() if snapshot else None, d2.data_ptr() if distance else None),
        *(None if table is None else table.data_ptr(), shim.scratch.data_ptr()),
    )
    assert error is None, error
    return d2.item() if distance else None


def check(shim: Shim, c: Case, fresh: Callable[[], Case] | None = None) -> None:
    copy = fresh or c.copy
    for snapshot in (False, True):
        a, b = copy(), c.copy()
        run(shim, GRADIENT, a, snapshot=snapshot, zero=snapshot)
        y_next: Tensor | None = b.y if snapshot else None
        reference.mix(b.x, b.y, b.neighbours, b.weights, b.acc, b.alpha, y_next, snapshot)
        assert same(a.x, b.x) and same(a.y, b.y) and same(a.acc, b.acc)
        a, b = copy(), c.copy()
        found = run(shim, DELTA, a, snapshot=snapshot, distance=snapshot)
        y_next, d2 = (b.y if snapshot else None), torch.empty((), dtype=torch.float64)
        reference.mix_delta(b.x, b.y, b.neighbours, b.weights, y_next, d2)
        assert same(a.x, b.x) and same(a.y, b.y)
        assert found is None or found == pytest.approx(d2.item(), rel=1e-12)


@pairs
def test_kernel_on_the_host(shim: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    for n in (0, 1, 7, 8, 256, 1003):
        for degree in (0, 1, 2, 3, 8, shim.fixed_degree, shim.fixed_degree + 2):
            check(shim, mix_inputs.case(model, wire, n, degree))


@pytest.mark.parametrize(("model", "wire"), [PAIRS[4], PAIRS[5]], ids=PAIR_NAMES[4:6])
def test_grid_stride(shim: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    check(shim, mix_inputs.case(model, wire, 1_000_003, 2))


@pairs
def test_misaligned(shim: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    c = mix_inputs.case(model, wire, 701, 2)
    for off in range(3):  # one buffer at a time is off by an element

        def fresh(off: int = off) -> Case:
            def at(t: Tensor, k: int) -> Tensor:
                return mix_inputs.buffer(t.numel(), t.dtype, t, int(off == k))

            near = [at(c.neighbours[0], 2), c.neighbours[1]]
            return Case(at(c.x, 0), at(c.y, 1), near, c.weights, at(c.acc, 0))

        check(shim, c, fresh)


@pairs
def test_special_values(shim: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    x, y = mix_inputs.special(model), mix_inputs.special(wire)
    c = Case(x, y, [y.flip(0), y.roll(3)], [0.5, 0.25, 0.25], x.roll(1), 0.125)
    a, b = c.copy(), c.copy()
    run(shim, GRADIENT, a, snapshot=True)
    reference.mix(b.x, b.y, b.neighbours, b.weights, b.acc, b.alpha, b.y, False)
    assert same(a.x, b.x) and same(a.y, b.y)


def test_a_missing_table_is_refused(shim: Shim) -> None:
    degree, f32 = shim.fixed_degree + 1, TYPES.index(torch.float32)
    c = mix_inputs.case(torch.float32, torch.float32, 8, degree)
    weights = (ctypes.c_double * (degree + 1))(*c.weights)
    list_of = (ctypes.c_void_p * degree)(*(v.data_ptr() for v in c.neighbours))
    error = shim.mix(
        *(GRADIENT, f32, f32, 8, c.x.data_ptr(), c.y.data_ptr(), list_of, weights, degree),
        *(None, 0.0, False, None, None, None, None),
    )
    assert error is not None and b"table is missing" in error


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_no_spills(ptx: Path, arch: str, tmp_path: Path) -> None:
    spills = cuda_build.spills(ptx, arch, tmp_path)
    assert len(spills) == KERNELS
    assert set(spills) == {("0", "0")}


def test_loads_and_stores_are_wide(ptx: Path) -> None:
    """The model's words have 128 bits, the wire's as many elements."""
    found = []
    for kernel in cuda_build.kernels(ptx):
        loads = len(re.findall("ld" + cuda_build.WIDE, kernel))
        halves = len(re.findall(r"ld\.global\.cs\.[a-z]+64", kernel))
        assert loads >= 1 and len(re.findall("st" + cuda_build.WIDE, kernel)) >= 1
        found.append((loads, halves))
    assert len(found) == KERNELS
    same = [model == wire for model, wire in PAIRS]
    # y_self, a neighbour, and acc or x, in each of the three kernels of a pair.
    assert sum(loads >= 3 for loads, _ in found) >= 3 * sum(same)
    half = [wire.itemsize * 2 == model.itemsize for model, wire in PAIRS]
    assert sum(halves >= 2 for _, halves in found) >= 3 * sum(half)


def test_no_fused_multiply_add(ptx: Path) -> None:
    assert not re.search(r"\bfma\.", ptx.read_text())
