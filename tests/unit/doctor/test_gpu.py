"""`doctor --gpu`: every check can fail, and a verdict says what was measured."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_oldsgd.doctor.gpu import bandwidth, bits, contexts, verdicts
from hpc_oldsgd.doctor.gpu.examine import in_short
from hpc_oldsgd.doctor.gpu.verdicts import Verdict
from support import ROOT

Mpirun = Callable[..., "subprocess.CompletedProcess[str]"]
CPU = torch.device("cpu")
GPU = {"name": "H100", "capability": "9.0", "uuid": "u0", "free_bytes": 10**10}
EXTENSION = {"native": True, "cuda": True, "cuda_archs": "80-real 90", "isa": "avx2"}
CHECKS = ["device", "kernel", "bits", "narrow", "bandwidth", "cuda-aware", "order", "messages"]
CHECKS += ["overlap", "contexts"]


def test_right_bits() -> None:
    for check, of in ((bits.wide, 315), (bits.narrow, 280)):
        found = check(CPU, 0.5)
        assert found["wrong"] == 0 and found["of"] == of and found["cases"] >= 1
        said = verdicts.of_bits("bits", "the op", [found, {**found, "cases": of}])
        assert said.state == "ok" and (f"of {of} cases" in said.text or found["cases"] == of)


def test_cases_meet_every_type_size_and_degree_early_and_all_combinations_in_the_end() -> None:
    for kinds in (bits.PAIRS, bits.KINDS):
        lengths = [len(kinds), len(bits.SIZES), len(bits.DEGREES)]
        wanted = math.prod(lengths)
        assert len({tuple(k % one for one in lengths) for k in range(wanted)}) == wanted
        chosen = [bits._chosen(k, kinds) for k in range(9)]
        assert len({kind for kind, _, _ in chosen}) == len(kinds)
        assert {d for _, _, d in chosen} == set(bits.DEGREES)
    assert len(bits.PAIRS) == 9 and len(bits.KINDS) == 8


@pytest.mark.parametrize(
    ("op", "check"),
    [
        ("fused_mix", bits.wide),
        ("fused_mix_delta", bits.wide),
        ("encode", bits.narrow),
        ("decode_add", bits.narrow),
        ("fused_mix_narrow", bits.narrow),
    ],
)
def test_a_wrong_bit(op: str, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(bits.ops, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        written = args[2] if op == "encode" else args[0]
        if written.is_floating_point():
            whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[written.element_size()]
            written = written.view(whole)
        written.view(-1)[-1] ^= 1  # the lowest bit of one number
        return result

    monkeypatch.setattr(bits.ops, op, wrong)
    found = check(CPU, 0.0)
    assert found["cases"] == 1 and found["wrong"]
    said = verdicts.of_bits("bits", "the op", [{**found, "wrong": 0}, found])
    assert said.state == "wrong" and "on rank 1" in said.text and "numbers, degree" in said.text


def test_a_wrong_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = bits.ops.fused_mix_delta
    monkeypatch.setattr(bits.ops, "fused_mix_delta", lambda *a, **k: right(*a, **k) * (1 + 1e-6))
    assert bits.wide(CPU, 0.0)["first"][0].count("the distance is") == 1


def test_minus_zero_is_not_zero_and_a_nan_is_a_nan() -> None:
    a, b = torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, -float("nan"), 1.0])
    assert bits.differing(a, b) == 1


def test_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "ON_CPU", 1 << 14)
    seen = bandwidth.measure(CPU, 20.0)
    assert len(seen["bytes_per_s"]) == 6 and all(r > 0 for r in seen["bytes_per_s"].values())
    assert seen["peak_bytes_per_s"] is None and seen["skipped"] == []
    assert bandwidth.measure(CPU, 0.0)["skipped"] == ["bf16", "int8", "int4"]
    a100 = SimpleNamespace(memory_clock_rate=1_215_000, memory_bus_width=5120)
    assert bandwidth.peak_of(a100) == pytest.approx(1.555e12, rel=1e-3)
    assert bandwidth.peak_of(SimpleNamespace(name="of an older torch")) is None


def rates(**share: float) -> dict[str, Any]:
    made = {op.replace("_", " "): 1e12 * s for op, s in share.items()}
    return {
        "numbers": 1, "copy_bytes_per_s": 1e12, "peak_bytes_per_s": 2e12, "bytes_per_s": made,
        "skipped": [],
    }  # fmt: skip


def test_a_slow_kernel() -> None:
    good, bad = rates(fp32_delta=0.9, int8=0.3), rates(fp32_delta=0.5, int8=0.3)
    fine = verdicts.of_bandwidth([good, good], True)
    assert fine.state == "ok" and "45% of the memory's 2000.00 GB/s" in fine.text
    slow = verdicts.of_bandwidth([good, bad], True)
    assert slow.state == "slow" and "fp32 delta on rank 1 has 0.50" in slow.text and slow.fix
    assert verdicts.of_bandwidth([rates(fp32_delta=0.9, int8=0.2)], True).state == "slow"
    unknown = {**good, "peak_bytes_per_s": None, "skipped": ["int4"]}
    text = verdicts.of_bandwidth([unknown], True).text
    assert "peak is unknown" in text and "no time for int4" in text


def machine(**changes: Any) -> dict[str, Any]:
    return {"gpu": GPU, "plain_torch_because": "", "extension": EXTENSION, **changes}


def test_device_and_kernel() -> None:
    assert verdicts.of_device([machine(), machine()]).state == "ok"
    none = verdicts.of_device([machine(gpu=None)])
    assert none.state == "not tried" and "NO GPU WAS TRIED" in none.text
    some = verdicts.of_device([machine(), machine(gpu=None)])
    assert some.state == "wrong" and some.text.startswith("rank 1 ")
    assert "80-real 90" in verdicts.of_kernel([machine()]).text
    plain = verdicts.of_kernel([machine(), machine(plain_torch_because="no nvcc")])
    assert plain.state == "slow" and "mixes on rank 1" in plain.text and "no nvcc" in plain.text


def test_cuda_aware() -> None:
    def of(says: bool, works: bool, why: str = "") -> Verdict:
        return verdicts.of_direct([{"says": says, "works": works, "why_not": why}], True)

    assert of(True, True).state == "ok" and not of(True, True).fix
    assert "--staging direct" in of(False, True).fix
    crashed = of(True, False, "a trial ended with SIGSEGV")
    assert crashed.state == "wrong" and "SIGSEGV" in crashed.text and crashed.fix
    plain = of(False, False, "a trial ended with SIGSEGV")
    assert plain.state == "ok" and plain.text.startswith("MPI is not CUDA-aware")


def test_order() -> None:
    def way(wrong: int, rounds: int = 2000) -> dict[str, Any]:
        return {"rounds": rounds, "of": 2000, "wrong": wrong, "first": [7] * wrong}

    good = {"host": way(0), "direct": way(0, 150)}
    fine = verdicts.of_order([good, good])
    assert fine.state == "ok" and "2000 by host, 150 of 2000 by direct" in fine.text
    early = verdicts.of_order([good, {"host": way(0), "direct": way(3)}])
    assert early.state == "wrong" and "3 of 2000 rounds by --staging direct" in early.text
    assert "on rank 1; the first in round 7" in early.text and "--staging host is safe" in early.fix
    assert verdicts.of_order([{"host": way(1)}]).fix.startswith("Do not train here")


def test_a_slow_link() -> None:
    def of(host: float, direct: float | None, copy: float = 0.01) -> Verdict:
        seconds = {"host": host} if direct is None else {"host": host, "direct": direct}
        return verdicts.of_messages([{"bytes": 10**8, "seconds": seconds, "copy_s": copy}], False)

    assert of(0.05, 0.02).state == "ok" and "2.00 GB/s" in of(0.05, 0.02).text
    assert "not tried" in of(0.05, None).text
    narrow_link = of(0.5, 0.02, copy=0.4)
    assert narrow_link.state == "slow" and "copies slowly" in narrow_link.text
    assert "--staging host" in of(0.02, 0.05).fix


def test_not_hidden() -> None:
    def of(ratio: float) -> Verdict:
        one = {"round_s": ratio, "compute_s": 1.0, "message_s": 0.9, "ratio": ratio}
        return verdicts.of_hidden([one], "direct")

    assert of(1.05).state == "ok" and of(1.9).state == "slow" and "1.90 times" in of(1.9).text


class Driver:
    """CUDA's driver on a host with two GPUs."""

    def __init__(self, *opened: int) -> None:
        self.opened = opened

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = ordinal
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:
        ctypes.cast(active, ctypes.POINTER(ctypes.c_int))[0] = device.value in self.opened
        return 0


def test_a_second_context() -> None:
    second = torch.device("cuda", 1)
    alone, both = (contexts.measure(second, Driver(*found)) for found in ((1,), (0, 1)))
    assert verdicts.of_contexts([alone, alone]).state == "ok"
    said = verdicts.of_contexts([alone, both])
    assert said.state == "wrong" and "rank 1 works on 1 and holds memory on 0" in said.text
    assert verdicts.of_contexts([contexts.measure(CPU)]).state == "not tried"


def test_in_short() -> None:
    good, bad = verdicts.ok("bits", "", {}), verdicts.not_tried("order", "")
    assert in_short([good]) == "all is right" and in_short([good, bad]) == "not tried: order"
    wrong = verdicts.failed("kernel", [{}, {"error": "RuntimeError: no kernel image"}])
    assert wrong is not None and "on rank 1: RuntimeError: no kernel image" in wrong.text
    assert in_short([good, wrong]).startswith("WRONG: kernel; do not train")


def test_two_ranks_on_the_cpu(mpirun: Mpirun) -> None:
    """One command runs every check, within its time."""
    command = ("-m", "hpc_oldsgd.doctor", "--gpu", "--device", "cpu", "--seconds", "3", "--json")
    done = mpirun(2, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["checks"]] == CHECKS
    states = {one["name"]: one["state"] for one in found["checks"]}
    assert states["device"] == states["contexts"] == "not tried" and "device" in found["verdict"]
    late = {name for name, state in states.items() if state == "not tried"}
    assert "wrong" not in states.values()
    assert {"bits", "narrow", "kernel"}.isdisjoint(late), "a busy machine may skip the last ones"
    for one in found["checks"]:
        assert one["state"] != "ok" or one["figures"]


def test_the_form_for_a_report_names_the_command() -> None:
    for page in (".github/ISSUE_TEMPLATE/gpu-report.md", "README.md", "docs/doctor.md"):
        assert "python -m hpc_oldsgd.doctor --gpu" in Path(ROOT / page).read_text(), page
