"""Running statistics, as BatchNorm keeps them: averages that forget, at the end of x.

A pass leaves 1 - momentum of what they were, of a plain average over N passes N / (N + 1). Of what
neighbours differed by when the snapshots were taken only as much is added as is left by now: as if
it had been mixed in then. Added in full it would overshoot: variances below zero, and from ten
passes or so on differences that grow from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import BATCH_NORMS, INSTANCE_NORMS, hooks
from .flat import Flat


@dataclass(frozen=True)
class Running:
    """Those of one agent, or of all n in one process."""

    x: Tensor
    """The first agent's."""
    start: int
    """Where they begin in x."""
    norms: list[list[Any]]
    """Of every agent here."""
    keep: Tensor
    """1 - momentum of each, and 1 for what is no statistic."""
    average: Tensor
    """Which of them are plain averages over all passes: momentum None."""
    which: Tensor
    """The norm of every element from `start` on."""

    def passes(self) -> Tensor:
        """So far, of every agent and norm; on the device, nobody waits for it."""
        rows = [torch.stack([norm.num_batches_tracked for norm in own]) for own in self.norms]
        return nn.functional.pad(torch.stack(rows), (0, 1))

    def left(self, since: Tensor) -> Tensor:
        """(agents, d - start): the share of an earlier value that is left."""
        # Agent by agent: torch's powers may differ in the last bit with the length of a vector.
        rows = []
        for now, then in zip(self.passes(), since, strict=True):
            plain = torch.where(now > then, then / now.clamp(min=1), 1.0)
            rows.append(torch.where(self.average, plain, self.keep ** (now - then)))
        return torch.stack(rows)[:, self.which]


def running_statistics(flats: Sequence[Flat]) -> Running | None:
    """Of modules that are alike, one for each agent here; None if they have none in x."""
    flat, norms = flats[0], [_norms(flat.module) for flat in flats]
    number = {
        id(statistic): k
        for k, norm in enumerate(norms[0])
        for statistic in (norm.running_mean, norm.running_var)
    }
    slots = [slot for slot in flat.slots if id(slot.tensor) in number]
    if not slots:
        return None
    start = slots[0].offset  # buffers come last
    which = torch.full((flat.d - start,), len(norms[0]), device=flat.device)
    for slot in slots:
        which[slot.offset - start :][: slot.tensor.numel()] = number[id(slot.tensor)]
    keep = [1.0 - (norm.momentum or 0.0) for norm in norms[0]]
    average = [norm.momentum is None and not _is_instance_norm(norm) for norm in norms[0]]
    return Running(
        flat.x, start, norms, torch.tensor([*keep, 1.0], device=flat.device),
        torch.tensor([*average, False], device=flat.device), which,
    )  # fmt: skip


def _norms(module: nn.Module) -> list[Any]:
    """Those with running statistics, each of which counts its passes from now on."""
    kinds = BATCH_NORMS + INSTANCE_NORMS
    found: list[Any] = [m for m in module.modules() if isinstance(m, kinds)]
    found = [norm for norm in found if norm.track_running_stats]
    for norm in filter(_is_instance_norm, found):
        if _count_pass not in hooks(norm):
            norm.register_forward_hook(_count_pass)
    return found


def _is_instance_norm(norm: nn.Module) -> bool:
    return isinstance(norm, INSTANCE_NORMS)


def _count_pass(norm: Any, *_: Any) -> None:
    """torch gives InstanceNorm BatchNorm's counter, and does not count."""
    if norm.training:
        norm.num_batches_tracked.add_(1)
