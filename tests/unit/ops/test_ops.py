"""The mixing op as a user meets it: errors, aliases, torch.compile, fork, the fallback."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from hpc_oldsgd import ops
from hpc_oldsgd.doctor.machine import memory_available
from hpc_oldsgd.ops import checks, reference
from hpc_oldsgd.ops import native as loaded
from support import mix_inputs
from support.bits import same
from support.mix_inputs import Wrapped

N = 40
native = pytest.mark.skipif(not ops.native_available(), reason="the extension is not built")


def t(n: int = N, dtype: torch.dtype = torch.float32, fill: float = 1.0) -> Tensor:
    return torch.full((n,), fill, dtype=dtype)


def partly(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    memory = t(2 * N, dtype)
    return memory[:N], memory[N // 2 : N // 2 + N]


W2 = [0.5, 0.5]
BAD_MIX: dict[str, Callable[[], dict[str, Any]]] = {
    "2 weights for 0 neighbours": lambda: {"neighbours": []},
    "1 weights for 1 neighbours": lambda: {"weights": [1.0]},
    "weights must be a list of real numbers": lambda: {"weights": [0.5, 1j]},
    "y_self is 41": lambda: {"y_self": t(41)},
    "a neighbour is 39": lambda: {"neighbours": [t(39)]},
    "a neighbour is 40 x torch.bfloat16": lambda: {"neighbours": [t(dtype=torch.bfloat16)]},
    "acc is 40 x torch.float64": lambda: {"acc": t(dtype=torch.float64)},
    "y_next is 40 x torch.float16": lambda: {"y_next": t(dtype=torch.float16)},
    "neither the model type": lambda: {"y_self": t(dtype=torch.float64)},
    "Cannot mix torch.float32 over torch.int8": lambda: {"y_self": t(dtype=torch.int8)},
    "Cannot mix torch.complex64": lambda: {"out": t(dtype=torch.complex64)},
    "y_self is not contiguous": lambda: {"y_self": t(2 * N)[::2]},
    "y_self is a negative view": lambda: {"y_self": torch._neg_view(t())},
    "out is not contiguous": lambda: {"out": t(2 * N)[::2]},
    "on meta, expected": lambda: {"y_self": t().to("meta")},
    "y_self is 40 x torch.float32 on cpu, expected 40 x torch.float32 on meta": lambda: {
        "out": t().to("meta")
    },
    "takes torch tensors, not ndarray": lambda: {"y_self": t().numpy()},
    "out partly overlaps y_self": lambda: dict(zip(("out", "y_self"), partly(), strict=True)),
    "y_next partly overlaps y_self": lambda: dict(zip(("y_next", "y_self"), partly(), strict=True)),
    "y_next and out must not share": lambda: dict(zip(("out", "y_next"), partly(), strict=True)),
    "out requires grad": lambda: {"out": t().requires_grad_()},
    "y_self requires grad": lambda: {"y_self": t().requires_grad_()},
    "a neighbour requires grad": lambda: {"neighbours": [t().requires_grad_()]},
    "acc requires grad": lambda: {"acc": t().requires_grad_()},
    "weights or alpha require grad": lambda: {"weights": torch.tensor(W2, requires_grad=True)},
    "have different shapes": lambda: {"y_self": t().view(4, 10), "neighbours": [t().view(10, 4)]},
}


@pytest.mark.parametrize("message", BAD_MIX)
def test_bad_input_is_named_and_nothing_is_written(message: str) -> None:
    arguments: dict[str, Any] = {"out": t(), "y_self": t(), "neighbours": [t()], "weights": W2}
    arguments |= BAD_MIX[message]()
    buffers = [a for a in arguments.values() if isinstance(a, Tensor) and a.device.type == "cpu"]
    before = [b.detach().clone() for b in buffers]
    with pytest.raises(ValueError, match=message):
        ops.fused_mix(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))
    if "acc" in arguments:
        return
    arguments["x"] = arguments.pop("out")
    with pytest.raises(ValueError, match=message.replace("out", "x")):
        ops.fused_mix_delta(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))


def test_zeroed_acc_must_be_apart() -> None:
    acc = t()
    with pytest.raises(ValueError, match="acc and out must not share"):
        ops.fused_mix(acc, t(), [], [1.0], acc, zero_acc=True)


@pytest.mark.parametrize("which", ["y_self", "neighbour", "acc"])
def test_out_may_be_an_input(which: str) -> None:
    c = mix_inputs.case(torch.float32, torch.float32, 1003, 2)
    out = {"y_self": c.y, "neighbour": c.neighbours[1], "acc": c.acc}[which]
    expected = torch.empty_like(out)
    reference.mix(expected, c.y, c.neighbours, c.weights, c.acc, c.alpha, None, False)
    ops.fused_mix(out, c.y, c.neighbours, c.weights, c.acc, c.alpha)
    assert same(out, expected)


def test_a_flat_buffer_fits_any_shape_of_its_size() -> None:
    x, y = torch.zeros(3, 4), torch.arange(12.0)
    ops.fused_mix(x, y, [y.view(3, 4)], W2)
    assert torch.equal(x, y.view(3, 4))


def test_two_shapes_of_one_size_are_refused() -> None:
    x, y = torch.zeros(3, 5), torch.arange(15.0)
    with pytest.raises(ValueError, match=r"y_self is \(5, 3\).*x is \(3, 5\).*different shapes"):
        ops.fused_mix_delta(x, y.view(5, 3), [y], W2)
    assert not x.any()


def _in_dual_level() -> None:
    with forward_ad.dual_level():
        ops.fused_mix(t(), forward_ad.make_dual(t(), t()), [t()], W2)


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "vmap": lambda: torch.vmap(lambda a: ops.fused_mix(a, t(), [t()], W2))(torch.ones(2, N)),
    "vmap of alpha": lambda: torch.vmap(lambda a: ops.fused_mix(t(), t(), [t()], W2, t(), a))(t(2)),
    "grad": lambda: torch.func.grad(lambda a: (ops.fused_mix(t(), a, [t()], W2), a.sum())[1])(t()),
    "jvp": lambda: torch.func.jvp(lambda a: ops.fused_mix(t(), a, [t()], W2), (t(),), (t(),)),
    "a dual tensor": _in_dual_level,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="vmap, grad or jvp") as caught:
        TRANSFORMS[name]()
    assert "\n" not in str(caught.value)


def test_alpha_may_be_a_tensor_that_is_a_number() -> None:
    out = t()
    ops.fused_mix(out, t(), [t()], W2, t(), torch.tensor(0.5))
    assert torch.equal(out, t(fill=0.5))
    with pytest.raises(ValueError, match="weights or alpha require grad"):
        ops.fused_mix(out, t(), [t()], W2, t(), torch.tensor(0.5, requires_grad=True))
    with torch.no_grad():
        ops.fused_mix(out, t().requires_grad_(), [t()], W2, t(), torch.tensor(0.5))


def test_alpha_under_compile_is_a_float() -> None:
    compiled = torch.compile(
        lambda out, alpha: ops.fused_mix(out, t(), [t()], W2, t(), alpha),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(Exception, match=r"alpha is a tensor.*float\(alpha\)"):
        compiled(t(), torch.tensor(0.5))


def test_weights_may_be_any_numbers() -> None:
    y, z, out = t(fill=1.0), t(fill=3.0), t()
    tensor = torch.tensor([1.0, 2.0])
    for weights in ((1, 2), tensor, tensor.numpy(), list(tensor), [True, 2.0]):
        ops.fused_mix(out, y, [z], weights)
        assert torch.equal(out, t(fill=7.0))


def test_a_write_is_seen_by_the_version() -> None:
    x, y, acc, y_next = t(), t(), t(), t()
    before = [v._version for v in (x, y, acc, y_next)]
    ops.fused_mix(x, y, [], [1.0], acc, 0.1, y_next=y_next)
    after = [v._version for v in (x, y, acc, y_next)]
    assert [a > b for a, b in zip(after, before, strict=True)] == [True, False, False, True]
    ops.fused_mix(x, y, [], [1.0], acc, 0.1, zero_acc=True)
    assert acc._version > after[2]
    version = x._version
    ops.fused_mix_delta(x, y, [], [1.0])
    assert x._version > version


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = t()
        ops.fused_mix_delta(x, t(), [t(fill=3.0)], W2)
        assert torch.equal(x, t(fill=2.0))


def test_under_no_grad_a_parameter_may_be_written() -> None:
    p = torch.nn.Parameter(t())
    with torch.no_grad():
        ops.fused_mix_delta(p, t(), [t(fill=3.0)], W2)
    assert torch.equal(p.detach(), t(fill=2.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def step(x: Tensor, y: Tensor, a: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        d2 = ops.fused_mix_delta(x, y, [a], [0.75, 0.25], y_next=y, distance=True)
        out = torch.empty_like(x)
        ops.fused_mix(out, y, [a], [0.75, 0.25], acc, 0.5, zero_acc=True)
        assert d2 is not None
        return out * 2, d2

    c = mix_inputs.case(torch.float32, torch.bfloat16, 1003, 1)
    d = c.copy()
    expected = step(c.x, c.y, c.neighbours[0], c.acc)
    found = torch.compile(step, fullgraph=True, backend=backend)(d.x, d.y, c.neighbours[0], d.acc)
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert same(d.x, c.x) and same(d.y, c.y) and same(d.acc, c.acc)


def test_opcheck() -> None:
    c = mix_inputs.case(torch.float32, torch.float32, 37, 2)
    mix = torch.ops.hpc_oldsgd.fused_mix.default
    delta = torch.ops.hpc_oldsgd.fused_mix_delta.default
    y_next, d2 = torch.empty_like(c.y), torch.empty((), dtype=torch.float64)
    torch.library.opcheck(mix, (c.x, c.y, c.neighbours, c.weights, c.acc, 0.5, y_next, True))
    torch.library.opcheck(delta, (c.x, c.y, c.neighbours, c.weights, y_next, d2))


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(N)
        d2 = ops.fused_mix_delta(x, torch.empty(N), [torch.empty(N)], W2, distance=True)
        assert d2 is not None and d2.shape == () and d2.dtype == torch.float64


def test_meta_tensors() -> None:
    x, y = torch.empty(N, device="meta"), torch.empty(N, dtype=torch.bfloat16, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.fused_mix(x, y, [y], W2, torch.empty_like(x), 0.1, y_next=y, zero_acc=True)
        d2 = ops.fused_mix_delta(x, y, [y], W2, y_next=y, distance=True)
    assert d2 is not None and d2.is_meta


@pytest.mark.parametrize("which", ["x", "y_self", "neighbour"])
def test_a_tensor_without_memory_of_its_own(which: str) -> None:
    x, y, z = t(), t(), t(fill=3.0)
    wrapped = [Wrapped(v) if which == name else v
               for name, v in (("x", x), ("y_self", y), ("neighbour", z))]  # fmt: skip
    ops.fused_mix_delta(wrapped[0], wrapped[1], [wrapped[2]], W2)
    assert torch.equal(x, t(fill=2.0))
    ops.fused_mix(wrapped[0], wrapped[1], [wrapped[2]], [2.0, 0.5])
    assert torch.equal(x, t(fill=3.5))


@native
def test_a_forked_child_mixes_with_threads() -> None:
    torch.set_num_threads(2)
    c = mix_inputs.case(torch.float32, torch.float32, 200_003, 2)
    expected = c.copy()
    ops.fused_mix_delta(expected.x, c.y, c.neighbours, c.weights)  # the parent has its threads now
    wanted = expected.x.numpy().tobytes()
    child = os.fork()
    if child == 0:
        ops.fused_mix_delta(c.x, c.y, c.neighbours, c.weights)
        # Not torch.equal: torch's own threads do not survive a fork.
        os._exit(0 if c.x.numpy().tobytes() == wanted else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@native
def test_the_threads_are_torchs() -> None:
    """Of their own they would stand behind torch's, which spin for a while after each operation."""
    if not loaded.openmp_entry():
        pytest.skip("this torch has no OpenMP that can be joined")
    code = """if True:
        import os, torch
        from hpc_oldsgd import ops
        torch.set_num_threads(3)
        x = torch.ones(1_000_000)
        x.mul_(2)
        before = len(os.listdir("/proc/self/task"))
        ops.fused_mix_delta(x, x.clone(), [torch.zeros_like(x)], [0.5, 0.5])
        print(before, len(os.listdir("/proc/self/task")))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, ran.stdout.split())
    assert before == after >= 3


@native
def test_from_many_python_threads_at_once() -> None:
    torch.set_num_threads(2)
    c = mix_inputs.case(torch.float32, torch.float32, 150_001, 2)
    expected = c.copy()
    for _ in range(20):
        ops.fused_mix_delta(expected.x, c.y, c.neighbours, c.weights)
    copies = [c.copy() for _ in range(4)]

    def work(own: mix_inputs.Case) -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            ops.fused_mix_delta(own.x, c.y, c.neighbours, c.weights)

    threads = [threading.Thread(target=work, args=(own,)) for own in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(own.x, expected.x) for own in copies)


def test_without_the_extension_it_says_so_once_and_works() -> None:
    code = """
import warnings, torch
from hpc_oldsgd import ops
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        x, y = torch.ones(5), torch.ones(5)
        d2 = ops.fused_mix_delta(x, y, [y * 3], [0.5, 0.5], y_next=y, distance=True)
        assert x.tolist() == y.tolist() == [2.0] * 5 and d2.item() == 10.0
assert not ops.native_available() and ops.build_info()["native"] is False
print(*(w.message for w in seen), sep="\\n")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HPC_OLDSGD_NATIVE": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("plain torch") == 1 and "HPC_OLDSGD_NATIVE=0" in ran.stdout


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_of_many_ranks_one_says_so(monkeypatch: pytest.MonkeyPatch, rank: str, times: int) -> None:
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setattr(loaded, "extension", None)
    monkeypatch.setattr(loaded, "_announced", threading.Event())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            ops.fused_mix(t(), t(), [], [1.0])
    assert len(seen) == times


@native
@pytest.mark.slow
@pytest.mark.skipif(memory_available() < 8 << 30, reason="needs 8 GB of free memory")
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 5000
    y = torch.zeros(n, dtype=torch.bfloat16)
    ones = [0, 2**31 - 1, 2**31, 2**31 + 1, n - 1]
    y[ones] = 1.0
    ops.fused_mix(y, y, [y], [0.25, 0.5])  # in place: one buffer of 4 GB is enough
    assert y[ones].tolist() == [0.75] * 5
    assert y[2**31 - 9 :].sum() == 3.0 and y[:9].sum() == 0.75


@native
def test_the_extensions_types_are_all_named() -> None:
    assert set(loaded.DTYPES) == set(checks.TYPES)
    assert sorted(d.name for d in loaded.DTYPES.values()) == sorted(
        loaded.extension.Dtype.__members__
    )


@native
def test_an_extension_of_other_sources_is_not_used() -> None:
    code = """if True:
        import hpc_oldsgd._native as extension
        extension.API -= 1
        from hpc_oldsgd import ops
        print(ops.build_info()["reason"], ops.native_available())"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "the extension was built from other sources: reinstall the package False\n"
