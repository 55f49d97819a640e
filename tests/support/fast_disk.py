"""A disk that is always fast enough: every checkpoint is saved at the round where it is due.

A run never waits for its disk. What is due while an older one is still being written is saved a
few rounds later, on a busy machine more than a few: too late for tests that stop a short run
after its second checkpoint, or name a round.
"""

from __future__ import annotations

from concurrent.futures import wait

import pytest

from hpc_oldsgd.checkpoints.writer import Checkpoints

_cast_wishes = Checkpoints.cast_wishes


def _once_written(checkpoints: Checkpoints) -> None:
    under_way = checkpoints._saving and checkpoints._saving.written
    wait([future for future in (under_way, checkpoints._commit_done) if future])
    _cast_wishes(checkpoints)


def make_prompt(patch: pytest.MonkeyPatch | None = None) -> None:
    """For as long as `patch` lasts; without one, for the rest of this process."""
    (patch or pytest.MonkeyPatch()).setattr(Checkpoints, "cast_wishes", _once_written)
