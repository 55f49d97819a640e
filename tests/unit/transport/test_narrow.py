"""The difference wire's streams: how a message lies in memory, and when rounding is too coarse."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hpc_oldsgd import ops, topology
from hpc_oldsgd.algorithms import LED, OLDSGD
from hpc_oldsgd.checkpoints.well_formed import _streams_fit
from hpc_oldsgd.errors import UserError
from hpc_oldsgd.launch import memory
from hpc_oldsgd.simulation.trajectory import trajectory
from hpc_oldsgd.transport import narrow
from hpc_oldsgd.transport.lost_share import LostShare
from hpc_oldsgd.transport.narrow import Form, Narrow, Stream, Streams, check_memory
from support.small_problems import quadratic, rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("d", "body"), [(100, 100), (100, 67), (5, 0), (1, 1), (129, 128)])
def test_both_ends_have_the_same_copy(bits, d, body):
    """Statistics behind the differences arrive as they are."""
    sender, receiver = Stream("a"), Stream("a")
    sender.form = receiver.form = Form(bits, d, body, 4)
    message = torch.zeros(sender.form.nbytes + 7, dtype=torch.uint8)
    x = rows(1, d)[0]
    sender.take(x, message, LostShare(bits))
    assert torch.equal(sender.z, x) and not message.any()  # the first one travels whole
    receiver.copies[3] = sender.z.clone()
    for k in range(5):
        sender.end()
        x += rows(1, d, seed=k)[0]
        sender.take(x, message, LostShare(bits))
        receiver.apply(3, message)
        assert torch.equal(receiver.copies[3], sender.z)
        assert torch.equal(sender.z[body:], x[body:])


def test_a_message_that_waits_is_not_encoded_twice():
    stream, lost = Stream("a"), LostShare(4)
    stream.form = Form(4, 200, 200, 4)
    message, x = torch.zeros(stream.form.nbytes, dtype=torch.uint8), rows(1, 200)[0]
    stream.take(x, message, lost)
    stream.end()
    x += rows(1, 200, seed=1)[0]
    stream.take(x, message, lost)
    z = stream.z.clone()
    streams = Streams(4, 1)
    streams._known["x:0:200:float32:0:0"] = stream
    saved = streams.state_dict()
    again = Streams(4, 1)
    again.load_state_dict(saved, torch.device("cpu"))
    (loaded,) = again._known.values()
    loaded.form = stream.form
    loaded.take(x, message, lost)
    assert torch.equal(loaded.z, z) and not loaded.known
    assert _streams_fit(saved, x)
    assert not _streams_fit(saved, x.double())
    assert not _streams_fit({"x:0:201:float32:0:0": saved["x:0:200:float32:0:0"]}, x)


def feed(bits: int, small: float, size: Callable[[int], float], messages: int = 120) -> list[str]:
    """Blocks of one large and many small numbers; those of message k are size(k) as large."""
    lost, said = LostShare(bits), []
    x = torch.zeros(640, dtype=torch.float64)
    z, message = x.clone(), torch.empty(ops.message_bytes(640, bits), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(messages):
            delta = small * torch.rand(640, generator=generator, dtype=x.dtype)
            delta[::64] = 1.0
            x = z + delta * size(k)
            with lost.watching("a", x, z, 640):
                ops.encode(x, z, message, bits)
        said = [str(one.message) for one in caught]
    return said


def test_too_few_bits_are_told_once():
    (said,) = feed(4, 0.07, lambda k: 1.05**k)
    assert "4 bits are too few for this run" in said and "use int8, or a smaller step size" in said
    assert feed(4, 0.07, lambda k: 1.0) == []  # much is lost, and not ever more
    assert feed(8, 0.07, lambda k: 1.05**k) == []
    assert feed(4, 1.0, lambda k: 1.02**k) == []  # larger differences of which little is lost


def test_slow_growth_without_an_end_is_told_too():
    (said,) = feed(4, 1.0, lambda k: 1.01**k, 500)
    assert "4 bits are too few for this run" in said
    assert feed(8, 1.0, lambda k: 1.01**k, 500) == []
    assert feed(4, 1.0, lambda k: 1e-3 + k, 2000) == []  # as a step size that is warmed up


def test_steep_growth_is_told_soon():
    (said,) = feed(4, 1.0, lambda k: 1.05**k)
    assert "4 bits are too few for this run" in said
    assert feed(8, 1.0, lambda k: 1.05**k) == []
    assert (
        feed(4, 1.0, lambda k: 1e-3 + k * k, 200) == []
    )  # faster than a warm-up, and slower later


@pytest.mark.parametrize(("wire", "told"), [("int4", 1), ("int8", 0)])
def test_led_with_4_bits_is_told_of_before_it_is_far(wire, told):
    """Its correction adds up what 4 bits lose; fp32 and 8 bits bring the agents together."""
    n, d = 8, 640
    x0 = rows(n, d).double().numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trajectory(LED(tau=1), "one-peer-ring", x0, quadratic(n, d), 0.02, 240, wire=wire)
    assert sum("bits are too few" in str(one.message) for one in caught) == told
    assert (float(np.abs(run.X[-1] - run.mean[-1]).max()) > 100) == bool(told)


@pytest.mark.parametrize(("wire", "told"), [("int4", 1), ("int8", 0)])
def test_a_run_that_4_bits_unsettle_and_8_do_not(wire, told):
    """At the border: after tau steps nothing is left of x, so e = (W - I) z changes its sign from
    round to round and keeps its size. What 4 bits lose makes it grow."""
    n, d = 8, 640
    rng = np.random.default_rng(0)
    target, noise = rng.normal(size=(n, d)), rng.normal(size=(10, n, d))

    def grad(X, k):
        return (X - target + 0.1 * noise[k % 10]).astype(np.float32)

    def apart(wire):
        x0 = np.zeros((n, d), dtype=np.float32)
        run = trajectory(OLDSGD(tau=5), "complete", x0, grad, 0.9, 400, batched=True, wire=wire)
        return float(np.abs(run.X[-1] - run.mean[-1]).max())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        narrow = apart(wire)
    assert sum("bits are too few" in str(one.message) for one in caught) == told
    assert (narrow > 10 * apart(None)) == bool(told)


def test_copies_that_do_not_fit_are_refused(monkeypatch, tmp_path):
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9 kB\nMemAvailable: 40 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(memory, "MEMINFO", table)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    ring, pairs = (topology.from_name(name, 4) for name in ("ring", "one-peer-exponential"))
    x = torch.zeros(1000)
    check_memory(Narrow(4), x, 1, ring, 0, 3)  # three copies for each of three ranks: 36 kB
    with pytest.raises(UserError, match="keeps 4 copies of the model, "):
        check_memory(Narrow(4), x, 1, pairs, 0, 3)
    with pytest.raises(UserError, match="keeps 6 copies of the model, "):
        check_memory(Narrow(4), x, 2, ring, 0, 3)  # as many of K-GT's second tensor
    with pytest.raises(UserError, match="use bf16, or a graph of fewer neighbours or phases"):
        trajectory("oldsgd", pairs, rows(4, 9000).numpy(), quadratic(4, 9000), 0.1, 1, wire="int8")
    with pytest.raises(UserError, match="keeps 2 copies of the model, "):
        trajectory("kgt", ring, rows(4, 1500).numpy(), quadratic(4, 1500), 0.1, 1, wire="int8")
    trajectory("oldsgd", ring, rows(4, 1500).numpy(), quadratic(4, 1500), 0.1, 1, wire="int8")
    trajectory("lsgd", ring, rows(4, 9000).numpy(), quadratic(4, 9000), 0.1, 1, wire="int8")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    check_memory(Narrow(4), x, 1, pairs, 0, 10**9)
    assert narrow.memory_available() is None
