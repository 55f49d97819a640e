"""How many threads torch gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_oldsgd.runs import session
from support.runs import in_memory, parse


@pytest.mark.parametrize(
    ("words", "small", "set_to"),
    [("", 10**6, [1]), ("", 1000, []), ("--threads 3", 10**6, [3]), ("--threads 3", 1000, [3])],
)
def test_a_small_model_has_one_thread(
    words: str, small: int, set_to: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two a gradient of the digits takes three times as long, on busy cores thirty times."""
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(session, "SMALL", small)
    in_memory(parse(f"--task digits --agents 2 {words}", Path("none")))
    assert given == set_to
