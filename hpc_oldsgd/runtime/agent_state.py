"""An Agent's state: all that a resumed loop needs of one rank, checked when it is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ..errors import UserError
from ..torch_private import steps_of
from . import part_file

if TYPE_CHECKING:
    from .agent import Agent


def made(agent: Agent) -> dict[str, Any]:
    """What must be the same when the state is loaded."""
    return {
        "algorithm": repr(agent.algorithm),
        "model": agent.flat.signature(),
        "ranks": agent.n,
        "rank": agent.rank,
    }


def check(agent: Agent, state: dict[str, Any]) -> None:
    """Before anything is changed."""
    if not {"x", "t", "r", "algorithm", "optimizer"} <= set(state):
        raise UserError("this is not an Agent's state: load what agent.state_dict() returned")
    saved, own = state.get("made"), made(agent)
    if saved is None:  # of the first version
        saved = own
    if saved["algorithm"] != own["algorithm"]:
        raise UserError(
            f"the state was saved under {saved['algorithm']}, and this Agent runs "
            f"{own['algorithm']}: make the Agent with the same algorithm and options"
        )
    if (saved["ranks"], saved["rank"]) != (own["ranks"], own["rank"]):
        raise UserError(
            f"the state is that of rank {saved['rank']} of {saved['ranks']}, and this is rank "
            f"{own['rank']} of {own['ranks']}: each rank loads the state it has saved"
        )
    if saved["model"] != own["model"] or state["x"].shape != agent.x.shape:
        pairs = zip(saved["model"].split(), own["model"].split(), strict=False)
        a, b = next(((a, b) for a, b in pairs if a != b), ("another number of tensors", "these"))
        raise UserError(f"the state is another model's: it has {a} where this model has {b}")


def check_same_step(agent: Agent, state: dict[str, Any]) -> None:
    """A framework on each rank may have taken the newest checkpoint that it found. Collective."""
    steps = agent.gather(str(int(state["t"])))
    if len(set(steps)) > 1:
        raise UserError(
            f"the ranks would go on from different steps ({', '.join(steps)}): load the newest "
            "checkpoint that all ranks have"
        )


def random_state() -> dict[str, Any]:
    """Of the generators that a training loop draws from, in plain types."""
    name, keys, *rest = cast(Any, np.random.get_state())
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())  # a framework may load all tensors to a GPU
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def save(agent: Agent, folder: Path, also: dict[str, Any]) -> None:
    """FOLDER/step-120-rank-3.safetensors. Older files go once all ranks have written theirs."""
    state = agent.state_dict()
    for name, one in also.items():
        _check_not_behind(agent, name, one)
    content = {
        "agent": state,
        "also": {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in also.items()},
    }

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            part_file.write(_path(folder, agent.t, agent.rank), part_file.snapshot(content))
        except TypeError as error:
            raise UserError(
                f"{error}: give things with a state_dict(), tensors, numbers, text, lists and "
                "dictionaries"
            ) from None

    agent.check_together(write)
    for t in _steps(folder, agent.rank) - {agent.t}:
        _path(folder, t, agent.rank).unlink()


def load(agent: Agent, folder: Path, also: dict[str, Any]) -> dict[str, Any]:
    """The newest step that all ranks have written: a job may have died between two of them."""
    own = _steps(folder, agent.rank)
    everybody = [set(map(int, text.split())) for text in agent.gather(" ".join(map(str, own)))]
    common = set.intersection(*everybody)
    if not common:
        raise UserError(f"{folder} holds no checkpoint that all {agent.n} ranks have written")
    path = _path(folder, max(common), agent.rank)
    content = agent.check_together(lambda: _read(path))
    values: dict[str, Any] = {}
    agent.check_together(lambda: _check_names(content["also"], also))
    for name, saved in content["also"].items():
        if name in also:
            also[name].load_state_dict(saved)
        else:
            values[name] = saved
    state = content["agent"]
    if "random" in content:  # of an earlier version
        state["random"] = content["random"]
    agent.load_state_dict(state)
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = part_file.read(path)
    except part_file.Unusable as error:
        raise UserError(f"the checkpoint is damaged: {error}") from None
    return content


def _check_names(saved: dict[str, Any], given: dict[str, Any]) -> None:
    for name in given:
        if name not in saved:
            known = ", ".join(saved) or "nothing else"
            raise UserError(f"the checkpoint holds no {name}: it was saved with {known}")


def _check_not_behind(agent: Agent, name: str, one: Any) -> None:
    """A scheduler that steps with the agent and is one step behind is saved too early."""
    if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        steps = steps_of(one)
        if steps and steps == agent.t - 1:
            raise UserError(
                f"{name} is one step behind the agent: call {name}.step() first, then agent.save()"
            )


def _path(folder: Path, t: int, rank: int) -> Path:
    return folder / f"step-{t}-rank-{rank}.safetensors"


def _steps(folder: Path, rank: int) -> set[int]:
    found = folder.glob(f"step-*-rank-{rank}.safetensors")
    return {int(path.name.split("-")[1]) for path in found}
