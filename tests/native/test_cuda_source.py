"""csrc/mix.cu without a GPU: run on the host through a shim, and read as PTX."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_oldsgd import ops
from hpc_oldsgd.ops import reference
from hpc_oldsgd.ops.checks import CODE
from support import mix_inputs
from support.mix_inputs import PAIR_NAMES, PAIRS, Case, same

Shim = Callable[..., bytes | None]
FIXED_DEGREE = 64  # kMaxFixedDegree of mix.h
SCRATCH = 4096  # kCudaScratch
KERNELS = 3 * len(PAIRS)  # gradient, delta, delta with distance
HERE = Path(__file__).parent
pairs = pytest.mark.parametrize(("model", "wire"), PAIRS, ids=PAIR_NAMES)


def compile_with(*command: str | Path) -> str:
    ran = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


@pytest.fixture(scope="session")
def shim_mix(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes | None]:
    """csrc/mix.cu as g++ compiles it over the shim; returns an error text or None."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    library = tmp_path_factory.mktemp("shim") / "mix_shim.so"
    compile_with(
        *("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"),
        *("-shared", "-fPIC", "-I", HERE / "cuda_shim", HERE / "mix_shim.cpp", "-o", library),
    )
    function = ctypes.CDLL(str(library)).shim_mix
    p, i64, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    function.argtypes = [ctypes.c_int] * 3 + [i64, p, p, p, p, i64, p, double, ctypes.c_bool]
    function.argtypes += [p] * 4
    function.restype = ctypes.c_char_p
    return function  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("nvcc"):
        pytest.skip("there is no nvcc")
    path = tmp_path_factory.mktemp("ptx") / "mix.ptx"
    flags = ("-std=c++17", "-O3", "-fmad=false", "-arch=compute_80", "-ptx")
    compile_with("nvcc", *flags, HERE / "../../csrc/mix.cu", "-o", path)
    return path


def run(
    shim: Shim, form: int, c: Case, *, snapshot: bool, zero: bool = False, distance: bool = False
) -> float | None:
    addresses = [v.data_ptr() for v in c.neighbours]
    degree = len(addresses)
    list_of = (ctypes.c_void_p * degree)(*addresses)
    weights = (ctypes.c_double * (degree + 1))(*c.weights)
    table = ops._address_table(addresses, c.weights) if degree > FIXED_DEGREE else None
    scratch = torch.zeros(SCRATCH, dtype=torch.float64)
    d2 = torch.full((), -1.0, dtype=torch.float64)
    error = shim(
        *(form, CODE[c.x.dtype], CODE[c.y.dtype], c.x.numel(), c.x.data_ptr(), c.y.data_ptr()),
        *(list_of, weights, degree, c.acc.data_ptr() if form == ops.GRADIENT else None, c.alpha),
        *(zero, c.y.data_ptr() if snapshot else None, d2.data_ptr() if distance else None),
        *(None if table is None else table.data_ptr(), scratch.data_ptr()),
    )
    assert error is None, error
    return d2.item() if distance else None


def check(shim: Shim, c: Case, fresh: Callable[[], Case] | None = None) -> None:
    copy = fresh or c.copy
    for snapshot in (False, True):
        a, b = copy(), c.copy()
        run(shim, ops.GRADIENT, a, snapshot=snapshot, zero=snapshot)
        y_next: Tensor | None = b.y if snapshot else None
        reference.mix(b.x, b.y, b.neighbours, b.weights, b.acc, b.alpha, y_next, snapshot)
        assert same(a.x, b.x) and same(a.y, b.y) and same(a.acc, b.acc)
        a, b = copy(), c.copy()
        found = run(shim, ops.DELTA, a, snapshot=snapshot, distance=snapshot)
        y_next, d2 = (b.y if snapshot else None), torch.empty((), dtype=torch.float64)
        reference.mix_delta(b.x, b.y, b.neighbours, b.weights, y_next, d2)
        assert same(a.x, b.x) and same(a.y, b.y)
        assert found is None or found == pytest.approx(d2.item(), rel=1e-12)


@pairs
def test_kernel_on_the_host(shim_mix: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    for n in (0, 1, 7, 8, 1003):
        for degree in (0, 1, 2, 3, 8, FIXED_DEGREE, FIXED_DEGREE + 2):
            check(shim_mix, mix_inputs.case(model, wire, n, degree))


@pytest.mark.parametrize(("model", "wire"), [PAIRS[4], PAIRS[5]], ids=PAIR_NAMES[4:6])
def test_grid_stride(shim_mix: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    check(shim_mix, mix_inputs.case(model, wire, 1_000_003, 2))


@pairs
def test_misaligned(shim_mix: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    c = mix_inputs.case(model, wire, 701, 2)
    for off in range(3):  # one buffer at a time is off by an element

        def fresh(off: int = off) -> Case:
            def at(t: Tensor, k: int) -> Tensor:
                return mix_inputs.buffer(t.numel(), t.dtype, t, int(off == k))

            near = [at(c.neighbours[0], 2), c.neighbours[1]]
            return Case(at(c.x, 0), at(c.y, 1), near, c.weights, at(c.acc, 0))

        check(shim_mix, c, fresh)


@pairs
def test_special_values(shim_mix: Shim, model: torch.dtype, wire: torch.dtype) -> None:
    x, y = mix_inputs.special(model), mix_inputs.special(wire)
    c = Case(x, y, [y.flip(0), y.roll(3)], [0.5, 0.25, 0.25], x.roll(1), 0.125)
    a, b = c.copy(), c.copy()
    run(shim_mix, ops.GRADIENT, a, snapshot=True)
    reference.mix(b.x, b.y, b.neighbours, b.weights, b.acc, b.alpha, b.y, False)
    assert same(a.x, b.x) and same(a.y, b.y)


def test_a_missing_table_is_refused(shim_mix: Shim) -> None:
    c = mix_inputs.case(torch.float32, torch.float32, 8, FIXED_DEGREE + 1)
    weights = (ctypes.c_double * (FIXED_DEGREE + 2))(*c.weights)
    list_of = (ctypes.c_void_p * (FIXED_DEGREE + 1))(*(v.data_ptr() for v in c.neighbours))
    one = CODE[torch.float32]
    error = shim_mix(
        *(0, one, one, 8, c.x.data_ptr(), c.y.data_ptr(), list_of, weights, FIXED_DEGREE + 1),
        *(None, 0.0, False, None, None, None, None),
    )
    assert error is not None and b"table is missing" in error


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_no_spills(ptx: Path, arch: str, tmp_path: Path) -> None:
    out = tmp_path / "mix.cubin"
    said = compile_with("nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", ptx, "-o", out)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) == KERNELS
    assert set(spills) == {("0", "0")}


def test_loads_and_stores_are_128_bits_wide(ptx: Path) -> None:
    kernels = re.split(r"\.visible \.entry|\.entry", ptx.read_text())[1:]
    assert len(kernels) == KERNELS
    wide = r"\.global(?:\.\w+)*\.(?:v4\.[a-z]+32|v2\.[a-z]+64)"
    for kernel in kernels:
        # y_self, a neighbour, and acc or x; the result and y_next.
        assert len(re.findall("ld" + wide, kernel)) >= 3
        assert len(re.findall("st" + wide, kernel)) >= 2


def test_no_fused_multiply_add(ptx: Path) -> None:
    assert not re.search(r"\bfma\.", ptx.read_text())
