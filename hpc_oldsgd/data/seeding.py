"""Every random number of a run has a key: the run's seed, what it is for, the agent, the step.

Nothing is drawn from a generator that lives on between steps, so a run is the same for any order of
ranks, the same over MPI and in the simulator, and resumes from the integer k alone.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from ..errors import UserError


class Use(IntEnum):
    """What a random number is for; two uses never share a stream."""

    MODEL = 0
    PARTITION = 1
    ORDER = 2
    AUGMENT = 3
    STEP = 4
    SAMPLE = 5


def sequence(use: Use, seed: int, *key: int) -> np.random.SeedSequence:
    if seed < 0:
        raise UserError(f"the seed must be 0 or more, not {seed}")
    return np.random.SeedSequence(seed, spawn_key=(int(use), *key))


def generator(use: Use, seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(sequence(use, seed, *key)))


def seed_model(seed: int, agent: int = 0) -> None:
    """Before task.model(): the same agent index on every rank gives every rank the same model."""
    _seed_torch(sequence(Use.MODEL, seed, agent))


def seed_step(seed: int, i: int, k: int) -> None:
    """Before agent i's k-th forward pass: dropout and whatever else draws from torch."""
    _seed_torch(sequence(Use.STEP, seed, i, k))


def _seed_torch(sequence: np.random.SeedSequence) -> None:
    value = int(sequence.generate_state(1, np.uint64)[0])
    # torch.manual_seed visits every backend on each call (0.2 ms); this takes microseconds.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(value)
