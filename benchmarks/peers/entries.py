"""The contestants. Each is a generator: one turn is one gradient step, written as a user would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from hpc_oldsgd import Agent, algorithms, topology
from hpc_oldsgd.runtime.flat import Flat

from .load import Load

Steps = Iterator[None]


@dataclass(frozen=True)
class Entry:
    """A contestant, and what its rounds send."""

    name: str
    steps: Callable[[Load, int], Steps]
    graph: str = "all-reduce"
    wire: str = "fp32"
    every_step: bool = False  # talks at every step, not every tau
    ours: bool = False
    blocking: bool = False  # computes nothing while it talks
    needs: str = ""  # a package that may be missing
    even_ranks: bool = False

    def reason_to_skip(self, n: int) -> str:
        if self.needs and find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if self.even_ranks and n % 2:
            return "needs an even number of ranks"
        return ""


def alone(load: Load, tau: int) -> Steps:
    """One rank for itself: what a step costs when nothing is sent."""
    while True:
        load.zero_grad()
        load.gradient()
        load.optimizer.step()
        yield


def ddp(load: Load, tau: int) -> Steps:
    yield from through(DistributedDataParallel(load.model, gradient_as_bucket_view=True), load)


def through(model: DistributedDataParallel, load: Load) -> Steps:
    while True:
        load.zero_grad()
        load.gradient(model)
        load.optimizer.step()
        yield


def ddp_fp16(load: Load, tau: int) -> Steps:
    """torch's own hook; its bf16 hook wants NCCL."""
    model = DistributedDataParallel(load.model, gradient_as_bucket_view=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    yield from through(model, load)


def ddp_power_sgd(load: Load, tau: int) -> Steps:
    """torch's own hook, rank 1. The first two steps send everything: the least it allows.

    One bucket: with several, gloo's ranks wait for each other's all-reduces for ever.
    """
    model = DistributedDataParallel(load.model, gradient_as_bucket_view=True, bucket_cap_mb=10_000)
    state = power_sgd.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    yield from through(model, load)


def ddp_at_once(load: Load, tau: int) -> Steps:
    """The whole gradient becomes ready at the end, so that nothing of it overlaps."""
    load.at_once = True
    try:
        yield from ddp(load, tau)
    finally:
        load.at_once = False


def ddp_no_sync(load: Load, tau: int) -> Steps:
    model = DistributedDataParallel(load.model, gradient_as_bucket_view=True)
    while True:
        load.zero_grad()
        for _ in range(tau - 1):
            with model.no_sync():
                load.gradient(model)
            yield
        load.gradient(model)
        load.optimizer.step()
        yield


def post_local_sgd(load: Load, tau: int) -> Steps:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=tau, warmup_steps=tau - 1)
    optimizer = PostLocalSGDOptimizer(load.optimizer, averager)
    while True:
        load.zero_grad()
        load.gradient()
        optimizer.step()
        yield


@torch.no_grad()
def _mix(x: torch.Tensor, y: torch.Tensor, received: list[torch.Tensor], w: list[float]) -> None:
    x.sub_(y, alpha=sum(w))
    for y_j, w_j in zip(received, w, strict=True):
        x.add_(y_j, alpha=w_j)


def naive_overlap(load: Load, tau: int) -> Steps:
    """torch.distributed's isend and irecv, posted before the local steps, receives first."""
    x = Flat(load.model).x
    ring = topology.from_name("ring", dist.get_world_size()).neighbours(dist.get_rank())
    neighbours, w = [j for j, _ in ring], [w for _, w in ring]
    y, received = torch.empty_like(x), [torch.empty_like(x) for _ in ring]
    while True:
        y.copy_(x)
        works = [dist.irecv(r, j) for r, j in zip(received, neighbours, strict=True)]
        works += [dist.isend(y, j) for j in neighbours]
        for k in range(tau):
            load.zero_grad()
            load.gradient()
            load.optimizer.step()
            if k == tau - 1:
                for work in works:
                    if work is not None:
                        work.wait()
                _mix(x, y, received, w)
            yield


def decent_dp(load: Load, tau: int) -> Steps:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    model = DecentralizedDataParallel(
        load.model, lambda named: load.make_optimizer([p for _, p in named]), topology="ring",
        grad_clip_norm=load.clip or 0.0, _local_world_size=1,
    )  # fmt: skip
    while True:
        for k in range(tau):
            model.set_accumulate_grad(k < tau - 1)
            load.gradient(model)
            yield


def ours(
    name: str, graph: str = "ring", wire: str = "fp32", in_fragments: bool = False
) -> Callable[[Load, int], Steps]:
    """In as many fragments as there are local steps, if asked."""

    def steps(load: Load, tau: int) -> Steps:
        made: Any = algorithms.near_tau(name, tau)
        if in_fragments:
            made = replace(made, fragments=made.tau)
        agent = Agent(load.model, load.optimizer, made, graph, wire=wire, sync=load.real)
        yield from agent_steps(load, agent)

    return steps


def agent_steps(load: Load, agent: Agent) -> Steps:
    try:
        while True:
            load.zero_grad()
            load.gradient()
            agent.step()
            yield
    finally:
        agent.finish()


PAIRS = "one-peer-ring"
ENTRIES = [
    Entry("ddp", ddp, every_step=True),
    Entry("ddp, gradient at once", ddp_at_once, every_step=True),
    Entry("ddp, fp16 hook", ddp_fp16, wire="fp16", every_step=True),
    Entry("ddp, PowerSGD hook", ddp_power_sgd, wire="rank 1", every_step=True),
    Entry("ddp no_sync", ddp_no_sync, blocking=True),
    Entry("post-local SGD", post_local_sgd, blocking=True),
    Entry("naive isend/irecv", naive_overlap, "ring"),
    Entry("decent-dp", decent_dp, PAIRS, needs="decent_dp", even_ranks=True),
    Entry("lsgd", ours("lsgd"), ours=True, blocking=True),
    Entry("ldsgd", ours("ldsgd"), "ring", ours=True, blocking=True),
    Entry("dsgd_cta", ours("dsgd_cta"), "ring", ours=True, every_step=True),
    Entry("oldsgd", ours("oldsgd"), "ring", ours=True),
    Entry("oldsgd, P = tau", ours("oldsgd", in_fragments=True), "ring", ours=True),
    Entry("oldsgd, bf16", ours("oldsgd", wire="bf16"), "ring", "bf16", ours=True),
    Entry("oldsgd, int8", ours("oldsgd", wire="int8"), "ring", "int8", ours=True),
    Entry("oldsgd, int4", ours("oldsgd", wire="int4"), "ring", "int4", ours=True),
    Entry("oldsgd, int4, P = tau", ours("oldsgd", "ring", "int4", True), "ring", "int4", ours=True),
    Entry("oldsgd, one peer", ours("oldsgd", PAIRS), PAIRS, ours=True),
    Entry("oldsgd, one peer, bf16", ours("oldsgd", PAIRS, "bf16"), PAIRS, "bf16", ours=True),
]
