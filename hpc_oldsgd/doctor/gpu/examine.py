"""The checks of a GPU, in order, each with its share of the time. Rank 0 prints as they end."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import UserError
from ...launch.device import choose_device
from ...topology import Topology
from ...topology.core import Round
from .. import findings, findings_network, report
from . import bandwidth, bits, contexts, hidden, messages, order, verdicts
from .verdicts import Ranks, Verdict

if TYPE_CHECKING:
    from mpi4py import MPI

WAIT_S = 30.0  # for a message that never comes
GATHER_S = 60.0
MOST_S = 40.0  # past the time that was given: then a rank hangs
TRIAL_S = 30.0  # for the child process that tries device memory: it may hang
SHARE = {"bits": 0.2, "narrow": 0.15, "bandwidth": 0.15, "order": 0.25}


def gpu_or_cpu(wanted: str) -> torch.device:
    """The rank's GPU; the CPU only if it is asked for by name."""
    device = choose_device(wanted)
    if device.type == "cpu" and wanted != "cpu":
        raise UserError(
            "--gpu: torch sees no GPU here. Install a CUDA build of torch that fits the driver "
            "(nvidia-smi shows its version), or add --device cpu to try all but the GPU"
        )
    return device


def to_itself() -> Topology:
    """One rank whose only neighbour is itself: its messages take the same way through MPI."""
    ints, half = np.array([0, 1]), np.array([0.5])
    return Topology("to itself", 1, [Round(ints, np.array([0]), half, half)])


class Checks:
    """Runs checks on all ranks, one after the other, and says what each has found."""

    def __init__(self, comm: MPI.Comm, seconds: float, say: Callable[[Verdict], None]) -> None:
        self.comm, self.seconds, self.say = comm, seconds, say
        self.verdicts: list[Verdict] = []
        self.broken = ""
        """The check in which a rank stopped while others waited for its messages."""
        self.unfinished = False
        """MPI has a message that may never end."""
        self._start, self._used = time.perf_counter(), 0.0

    def share(self, name: str) -> float:
        return SHARE[name] * self.seconds

    def run(
        self,
        name: str,
        measure: Callable[[], dict[str, Any]],
        judge: Callable[[Ranks], Verdict],
        sends: bool = False,
    ) -> Ranks:
        """What every rank has measured; nothing if it was not tried. Collective."""
        if self._used > self.seconds:
            text = f"no time was left of the {self.seconds:g} s"
            return self._end(verdicts.not_tried(name, text, "Give it more: --seconds."))
        if sends and self.broken:
            text = f"no message can be sent after what happened to {self.broken}"
            return self._end(verdicts.not_tried(name, text))
        try:
            own = measure()
        except Exception as error:  # what a check meets is a finding
            own = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        ranks = self._everybody(own)
        bad = verdicts.failed(name, ranks)
        if bad and sends:
            self.broken = name
        self._end(bad or judge(ranks))
        return () if bad else ranks

    def _everybody(self, own: dict[str, Any]) -> Ranks:
        from ...transport.mpi.collectives import gather_text

        took = time.perf_counter() - self._start
        said = gather_text(self.comm, json.dumps([took, own]), GATHER_S)
        read = [json.loads(one) for one in said]
        self._used = max(took for took, _ in read)
        return [found for _, found in read]

    def _end(self, verdict: Verdict) -> Ranks:
        self.verdicts.append(verdict)
        if self.comm.rank == 0:
            self.say(verdict)
        return ()


def run(
    found: dict[str, Any], comm: MPI.Comm, topology: Topology, device: torch.device, options: Any
) -> int:
    """All checks; fills `found` and returns the exit code. Collective."""
    from ...transport.mpi.job import end_job, limit

    shown = comm.rank == 0 and not options.json
    if shown:
        print(report.start_of_gpu(found), flush=True)

    def say(verdict: Verdict) -> None:
        if shown:
            print("\n".join(report.of_verdict(dataclasses.asdict(verdict))), flush=True)

    checks = Checks(comm, options.seconds, say)
    with limit(options.seconds + MOST_S, "for the other ranks, while the GPU was examined"):
        examine_device(checks, found["machines"], device)
        examine_messages(checks, topology, device)
        checks.run("contexts", lambda: contexts.measure(device), verdicts.of_contexts)
    found["checks"] = [dataclasses.asdict(one) for one in checks.verdicts]
    found["gpu_tried"] = device.type == "cuda"
    found["verdict"] = in_short(checks.verdicts)
    ranks = found["machines"]
    said = [*findings.of_machines(ranks), *findings_network.of_mpi(ranks[0]["library"], comm.size)]
    found["warnings"] = [dataclasses.asdict(one) for one in said]
    wrong = int(any(one.state == "wrong" for one in checks.verdicts))
    found["seconds"] = time.perf_counter() - found.pop("begin")
    if comm.rank == 0:
        print(json.dumps(found) if options.json else report.end_of_gpu(found), flush=True)
    if checks.broken or checks.unfinished:  # MPI_Finalize would wait for messages that never end
        end_job(comm, "", wrong)
    return wrong


def examine_device(checks: Checks, machines: Ranks, device: torch.device) -> None:
    """What needs no message: is the arithmetic right, and how fast is it?"""
    on_gpu = any(one["gpu"] for one in machines)

    def compare(name: str, what: str, measure: Callable[..., dict[str, Any]]) -> None:
        checks.run(
            name,
            lambda: measure(device, checks.share(name)),
            lambda ranks: verdicts.of_bits(name, what, ranks),
        )

    checks.run("device", dict, lambda _: verdicts.of_device(machines))
    checks.run("kernel", dict, lambda _: verdicts.of_kernel(machines))
    compare("bits", "the mixing op, in both forms,", bits.wide)
    compare("narrow", "the difference wire, of 8 and 4 bits,", bits.narrow)
    checks.run(
        "bandwidth",
        lambda: bandwidth.measure(device, checks.share("bandwidth")),
        lambda ranks: verdicts.of_bandwidth(ranks, on_gpu),
    )


def examine_messages(checks: Checks, topology: Topology, device: torch.device) -> None:
    from ...transport.mpi import MpiTransport

    comm, on_gpu = checks.comm, device.type == "cuda"

    def made(mode: messages.Mode) -> MpiTransport:
        return MpiTransport(comm, topology, staging=mode, timeout_s=WAIT_S)

    tried = checks.run(
        "cuda-aware",
        lambda: messages.try_direct(comm, device, TRIAL_S),
        lambda ranks: verdicts.of_direct(ranks, on_gpu),
        sends=True,
    )
    checks.unfinished = any(one["unfinished"] for one in tried)
    modes: list[messages.Mode] = ["host"]
    if tried and all(one["works"] for one in tried):
        modes.append("direct")
    checks.run(
        "order",
        lambda: order.by_every_way(made, modes, device, checks.share("order")),
        verdicts.of_order,
        sends=True,
    )
    speeds = checks.run(
        "messages",
        lambda: messages.speed(made, modes, device),
        lambda ranks: verdicts.of_messages(ranks, comm.size == 1),
        sends=True,
    )
    seconds = speeds[0]["seconds"] if speeds else {}
    mode: messages.Mode = min(modes, key=lambda m: seconds.get(m, 0.0))
    checks.run(
        "overlap",
        lambda: hidden.measure(lambda: made(mode), device, speeds[0]["bytes"], seconds[mode]),
        lambda ranks: verdicts.of_hidden(ranks, mode, on_gpu),
        sends=True,
    )


def in_short(found: list[Verdict]) -> str:
    """One sentence."""

    def those(state: str) -> str:
        return ", ".join(one.name for one in found if one.state == state)

    said = []
    if those("wrong"):
        said.append(f"WRONG: {those('wrong')}; do not train before it is right")
    if those("slow"):
        said.append(f"slow: {those('slow')}")
    if those("not tried"):
        said.append(f"not tried: {those('not tried')}")
    return "; ".join(said) if said else "all is right"
