"""What the Agent adds to a training step when the network is free: with and without it, in turns.

Two copies of the model train in one process, one by its bare optimizer, one through the Agent, in
alternating blocks of whole rounds. A block starts one step into a round, when the message posted
at the round's boundary has arrived: so each block holds its own messages and mixings, no others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import algorithms
from ..cli.fields import at_least
from ..runs.mpi_start import start_mpi
from ..transport.base import Transport

CHANNELS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0 is a pooling


@dataclass(frozen=True)
class Options:
    """The Agent's cost per step against a bare optimizer, on VGG11; alone or under mpirun."""

    algorithm: str = "oldsgd"
    """Which algorithm the Agent runs."""
    topology: str = "ring"
    """Who talks to whom."""
    tau: int = 5
    """Local steps a round."""
    batch: int = 8
    """Images a step; 0 leaves out the gradient, so that the optimizer alone is compared."""
    momentum: float = 0.0
    """Of both optimizers."""
    rounds: int = 1
    """Rounds in a block."""
    pairs: int = 15
    """Blocks with and without the Agent, in turns."""
    threads: int = 0
    """Torch threads of a rank; 0: the machine's cores divided by its ranks."""
    json: bool = False
    """Print one line of JSON after the text."""

    def __post_init__(self) -> None:
        at_least(1, self, "tau", "rounds", "pairs")
        at_least(0, self, "batch", "threads")


def vgg11() -> nn.Module:
    """VGG11 for 32x32 images, 9.23M parameters, spelled out: no torchvision needed."""
    layers: list[nn.Module] = []
    inside = 3
    for outside in CHANNELS:
        if outside:
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
            inside = outside
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class Loop:
    """A user's training loop; `step` is the one line that the Agent changes."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(0)
        self.model = vgg11()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=options.momentum
        )
        self.batch: tuple[Tensor, Tensor] | None = None
        if options.batch:
            images = torch.randn(options.batch, 3, 32, 32)
            self.batch = images, torch.arange(options.batch) % 10
        else:
            for p in self.model.parameters():
                p.grad = torch.full_like(p, 1e-6)
        self.step: Callable[[], Any] = self.optimizer.step

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds a step: of the clock, and of the processor in all threads."""
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            if self.batch is not None:
                images, labels = self.batch
                loss = nn.functional.cross_entropy(self.model(images), labels)
                loss.backward()
            self.step()
            if self.batch is not None:
                self.optimizer.zero_grad()
        wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        return wall / steps, cpu / steps


def main(options: Options) -> None:
    from ..runtime.agent import Agent
    from ..transport.mpi.job import vendor

    comm = start_mpi("hpc_oldsgd.bench overhead")
    bare, ours = Loop(options), Loop(options)
    algorithm = algorithms.near_tau(options.algorithm, options.tau)
    agent = Agent(ours.model, ours.optimizer, algorithm, options.topology, comm)
    hosts = agent.transport.gather_text(socket.gethostname())
    share = max(1, len(os.sched_getaffinity(0)) // hosts.count(hosts[comm.rank]))
    torch.set_num_threads(options.threads or share)
    ours.step = agent.step
    blocks = np.zeros((comm.size, options.pairs, 4))
    blocks[comm.rank] = measure(bare, ours, agent.transport, options)
    exposed = [f.exposed for f in agent.transport.records]
    slowest = agent.transport.reduce(blocks).result().reshape(blocks.shape).max(axis=0)
    agent.finish()
    if comm.rank:
        return
    result = summary(slowest, exposed)
    settings = {
        **dataclasses.asdict(options),
        "ranks": comm.size,
        "mpi": vendor(),
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in ours.model.parameters()),
    }
    print(text(result, settings, algorithm.name))
    if options.json:
        print(json.dumps({**result, "settings": settings}))


def measure(
    bare: Loop, ours: Loop, transport: Transport, options: Options
) -> list[tuple[float, ...]]:
    """For each pair of blocks: wall and processor seconds a step, bare, then with the Agent."""
    steps = options.rounds * options.tau
    bare.run(steps)
    ours.run(steps + 1)  # one step into a round, see above
    blocks: list[tuple[float, ...]] = []
    for pair in range(options.pairs):
        times = {}
        # The second one runs with the caches and the clock speed that the first one left.
        for loop in (bare, ours) if pair % 2 else (ours, bare):
            transport.reduce(np.zeros(1)).result()
            times[loop] = loop.run(steps)
        blocks.append((*times[bare], *times[ours]))
    return blocks


def summary(slowest: NDArray[np.float64], exposed: Sequence[float]) -> dict[str, Any]:
    low, ratio, high = np.percentile(slowest[:, 2] / slowest[:, 0], [25, 50, 75])
    # Processor time is less noisy on a machine that others use too; it does not see waiting.
    cpu = np.percentile(slowest[:, 3] / slowest[:, 1], [25, 50, 75])
    bare_s, _, agent_s, _ = np.median(slowest, axis=0)
    return {
        "bare_s": bare_s,
        "agent_s": agent_s,
        "ratio": ratio,
        "ratio_quartiles": [low, high],
        "cpu_ratio": cpu[1],
        "cpu_ratio_quartiles": [cpu[0], cpu[2]],
        "exposed_s": float(np.median(exposed)),
    }


def text(r: dict[str, Any], s: dict[str, Any], algorithm: str) -> str:
    wall, cpu = ("{:.4f} to {:.4f}".format(*r[f"{k}_quartiles"]) for k in ("ratio", "cpu_ratio"))
    return (
        f"VGG11, {s['parameters']:,} parameters, batch {s['batch']}, "
        f"{s['ranks']} ranks of {s['threads']} threads, {algorithm}, tau {s['tau']}, {s['mpi']}\n"
        f"step with the bare optimizer {1e3 * r['bare_s']:.2f} ms, through the Agent "
        f"{1e3 * r['agent_s']:.2f} ms: ratio {r['ratio']:.4f} (quartiles {wall} "
        f"of {s['pairs']} pairs)\n"
        f"processor time, all threads: ratio {r['cpu_ratio']:.4f} (quartiles {cpu})"
    )
