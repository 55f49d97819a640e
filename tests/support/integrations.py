"""On two ranks: each example with a framework, beside a plain loop, ended and resumed.

One start for all, since the packages take seconds to import. Prints a line for each example.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

from hpc_oldsgd import OLDSGD, Agent, integrations
from support import ROOT

Weights = dict[str, Tensor]
comm = MPI.COMM_WORLD
steps = 0  # of AdamW
DIGITS = ("accelerate_loop", "lightning_trainer", "lightning_fabric")


def example(name: str, folder: Path, epochs: int) -> dict[str, Any]:
    global steps
    steps = 0
    sys.argv = [name, "--epochs", str(epochs), "--checkpoint", str(folder)]
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def plain(
    model: nn.Module, batches: list[Callable[[], Tensor]], decay: tuple[int, float]
) -> Weights:
    """The same training by hand: two losses a step, clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = StepLR(optimizer, *decay)
    with Agent(model, optimizer, OLDSGD(tau=5), topology="ring") as agent:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            first().backward()
            second().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            agent.step()
            scheduler.step()
        return agent.mean_state_dict()


def plain_digits(made: dict[str, Any]) -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.Dropout(0.2), nn.Linear(32, 10)),
    )
    sampler = DistributedSampler(made["data"], num_replicas=comm.size, rank=comm.rank)
    loader = DataLoader(made["data"], batch_size=20, sampler=sampler)
    batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            batches.append(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y) / 2)
    return plain(model, batches, (10, 0.9))


def check(name: str, folder: Path, reference: Callable[[dict[str, Any]], Weights]) -> None:
    whole = example(name, folder / "whole", epochs=2)
    taken = steps
    assert whole["saved"] is None and all(w.isfinite().all() for w in whole["weights"].values())
    same(whole["weights"], reference(whole), f"{name} and the plain loop")
    example(name, folder / "ended", epochs=1)
    resumed = example(name, folder / "ended", epochs=2)
    assert resumed["saved"] is not None and steps == taken // 2, (steps, taken)
    same(whole["weights"], resumed["weights"], f"{name} and its resumed run")
    if comm.rank == 0:
        print(f"{name} is the plain loop", flush=True)


def same(a: Weights, b: Weights, what: str) -> None:
    b = {key: b[key.removeprefix("net.")] for key in a} if set(a) != set(b) else b
    for key, tensor in a.items():
        assert torch.equal(tensor, b[key]), f"{what} differ in {key}"


def check_digits(name: str, folder: Path) -> None:
    """The plain loop drops out what the example did."""
    forward, seen = nn.Dropout.forward, []

    def recorded(self: nn.Dropout, x: Tensor) -> Tensor:
        if self.training and len(seen) < 80:
            seen.append(torch.get_rng_state())
        return forward(self, x)

    def reference(made: dict[str, Any]) -> Weights:
        assert len({bytes(state.tolist()) for state in seen}) == 80
        states = iter(seen)

        def replayed(self: nn.Dropout, x: Tensor) -> Tensor:
            torch.set_rng_state(next(states))
            return forward(self, x)

        nn.Dropout.forward = replayed
        try:
            return plain_digits(made)
        finally:
            nn.Dropout.forward = forward

    nn.Dropout.forward = recorded
    check(name, folder, reference)


def check_trainer(folder: Path) -> None:
    """The plain loop replays its batches, each with the random numbers it was trained with."""
    from transformers import GPT2LMHeadModel

    forward, seen = GPT2LMHeadModel.forward, []

    def recorded(self: Any, *args: Any, **inputs: Any) -> Any:
        if self.training and len(seen) < 40:
            seen.append((torch.get_rng_state(), inputs))
        return forward(self, *args, **inputs)

    recorded.__wrapped__ = forward  # type: ignore[attr-defined]  # the Trainer asks what it takes
    GPT2LMHeadModel.forward = recorded

    def reference(made: dict[str, Any]) -> Weights:
        assert len(seen) == 40
        torch.manual_seed(0)
        torch.randint(-1, 2, (320, 16))  # the data
        model = GPT2LMHeadModel(made["model"].config).train()

        def loss(state: Tensor, inputs: dict[str, Any]) -> Tensor:
            torch.set_rng_state(state)
            return model(**inputs).loss

        batches = [lambda s=state, i=inputs: loss(s, i) for state, inputs in seen]
        return plain(model, batches, (5, 0.95))

    check("hf_trainer", folder / "hf_trainer", reference)


def check_newest(folder: Path) -> None:
    """Rank 1 has saved step 30 and died before rank 0 had; step 9 is older than step 20."""
    own = folder / f"rank-{comm.rank}"
    for step in (9, 20, 30)[: 2 + comm.rank]:
        (own / f"step-{step}").mkdir(parents=True)
    assert integrations.newest(own, "step-*") == own / "step-20"
    assert integrations.newest(own / "none", "step-*") is None


def main() -> None:
    def count(optimizer: Any, *_: Any) -> None:
        global steps
        steps += isinstance(optimizer, torch.optim.AdamW)

    register_optimizer_step_post_hook(count)
    torch.set_num_threads(1)
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or ["hf_trainer", *DIGITS]
    assert {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & set(os.environ), "what Accelerate mistakes"
    integrations.start()
    check_newest(folder / "newest")
    if "hf_trainer" in wanted:
        check_trainer(folder)
    for name in DIGITS:
        if name in wanted:
            check_digits(name, folder / name)


if __name__ == "__main__":
    main()
