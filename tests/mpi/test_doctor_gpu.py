"""`doctor --gpu` over MPI, on the CPU and on the test device: each check sees what is broken."""

from __future__ import annotations

import runpy
import sys
import time
from typing import Any

import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.doctor.gpu import examine, hidden, messages, order, verdicts
from hpc_oldsgd.doctor.gpu.verdicts import Verdict
from hpc_oldsgd.topology import Topology
from hpc_oldsgd.transport.device import Host
from hpc_oldsgd.transport.mpi import MpiTransport
from support.late_device import LateDevice, Site

pytestmark = pytest.mark.max_ranks(2)
CPU = torch.device("cpu")
SIZES = (1, 1003)


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BATCH", 12), ("ROUNDS", 12), ("SIZES", SIZES)):
        monkeypatch.setattr(order, name, value)


def graph(comm: MPI.Comm) -> Topology:
    return examine.to_itself() if comm.size == 1 else topology.from_name("ring", comm.size)


def examined(comm: MPI.Comm, seconds: float) -> dict[str, Verdict]:
    checks = examine.Checks(comm, seconds, lambda verdict: None)
    examine.examine_messages(checks, graph(comm), CPU)
    return {one.name: one for one in checks.verdicts}


def stressed(
    comm: MPI.Comm, mode: messages.Mode, ignore: Site | None = None
) -> tuple[Verdict, set[Site]]:
    """What the doctor says of the order, and the lines that waited."""
    checks = examine.Checks(comm, 60.0, lambda verdict: None)
    with LateDevice() as device:
        device.ignore = ignore
        transport = MpiTransport(comm, graph(comm), staging=mode, timeout_s=30.0)

        def measure() -> dict[str, Any]:
            return {mode: order.measure(transport, CPU, 60.0, order.ROUNDS)}

        if checks.run("order", measure, verdicts.of_order, sends=True):
            transport.close()
        else:  # nothing was sent after the error
            transport.stop_engines()
    return checks.verdicts[0], device.sites


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", ["host", "direct"])
def test_every_wait_of_the_staging_is_seen(comm: MPI.Comm, mode: messages.Mode) -> None:
    right, sites = stressed(comm, mode)
    assert right.state == "ok" and f"{order.BATCH} by" in right.text
    waits = sorted(site for site in sites if site[0] == "staging.py")
    states = {site: stressed(comm, mode, site)[0].state for site in waits}
    # What MPI has written itself needs no wait: there `arrived` comes at once.
    least = 3 if mode == "host" else 2
    assert list(states.values()).count("wrong") >= least, states


@pytest.mark.mpi(min_size=2)
def test_all_checks_on_the_test_device(comm: MPI.Comm) -> None:
    with LateDevice() as device:
        found = examined(comm, 60.0)
        assert device.launches
    assert list(found) == ["cuda-aware", "order", "messages", "overlap"]
    assert found["cuda-aware"].state == found["order"].state == "ok", found
    assert "wrong" not in {one.state for one in found.values()}, found


def test_a_slow_link(comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Host.copy

    def slow(self: Host, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.02)
        right(self, target, source)

    def speed() -> Verdict:
        made = lambda mode: MpiTransport(comm, graph(comm), staging=mode)  # noqa: E731
        return verdicts.of_messages([messages.speed(made, ["host"], CPU)], comm.size == 1)

    monkeypatch.setattr(Host, "copy", slow)
    found = speed()
    assert found.state == "slow" and "copies slowly" in found.text


def test_messages_that_only_move_when_waited_for(comm: MPI.Comm) -> None:
    class Lazy(MpiTransport):
        def exchange(self, x: torch.Tensor, round: int, share: float = 1.0) -> Any:
            flight: Any = super().exchange(x, round, share)
            wait = flight.wait

            def later() -> None:
                time.sleep(0.1)
                wait()

            flight.wait = later
            return flight

    found = hidden.measure(lambda: Lazy(comm, graph(comm)), CPU, 4000, 0.001)
    assert verdicts.of_hidden([found], "direct").state == "slow"


def test_a_check_that_raises_and_a_time_that_is_over(comm: MPI.Comm) -> None:
    def wrong() -> dict[str, Any]:
        if comm.rank == comm.size - 1:
            raise RuntimeError("no kernel image")
        return {}

    fine = lambda ranks: verdicts.ok("x", "", {})  # noqa: E731
    checks = examine.Checks(comm, 60.0, lambda verdict: None)
    assert not checks.run("order", wrong, fine, sends=True)
    assert not checks.run("messages", dict, fine, sends=True)
    assert len(checks.run("contexts", dict, fine)) == comm.size
    states = [one.state for one in checks.verdicts]
    assert states == ["wrong", "not tried", "ok"]
    assert f"on rank {comm.size - 1}: RuntimeError: no kernel image" in checks.verdicts[0].text
    late = examine.Checks(comm, 1e-9, lambda verdict: None)
    late.run("bits", dict, fine)
    assert not late.run("narrow", dict, fine)
    assert [one.state for one in late.verdicts] == ["ok", "not tried"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(
    comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpc_oldsgd.doctor", "--gpu"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hpc_oldsgd.doctor", run_name="__main__")
    said = capfd.readouterr()
    assert ended.value.code == 2 and not said.out
    lines = said.err.splitlines()
    assert len(lines) == (comm.rank == 0)
    assert all(one.startswith("hpc_oldsgd.doctor: --gpu: torch sees no GPU here.") for one in lines)
