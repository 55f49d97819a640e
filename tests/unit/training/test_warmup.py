"""The step size of the first rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_oldsgd.checkpoints import store
from hpc_oldsgd.errors import UserError
from support.runs import SHORT, in_memory, parse, rows_of, simulated


def alphas(words: str) -> list[float]:
    """After each step of a run, the alpha of the next one."""
    seen: list[float] = []
    asked = parse(f"--task logistic --agents 3 {words}")
    session = in_memory(asked, on_step=lambda t: seen.append(session.runner.alpha))
    session.run()
    return seen


def test_alpha_grows_from_round_to_round() -> None:
    found = alphas("--algorithm ldsgd --tau 4 --warmup 10 --alpha 0.5 --iterations 16")
    assert found == pytest.approx([0.2] * 3 + [0.4] * 4 + [0.5] * 9)
    assert alphas("--tau 4 --alpha 0.5 --iterations 8") == [0.5] * 8
    assert alphas("--tau 4 --warmup 3 --alpha 0.5 --iterations 8") == [0.5] * 8


def test_a_negative_warmup_is_refused() -> None:
    with pytest.raises(UserError, match="--warmup must be at least 0"):
        parse("--warmup -1")


def test_a_checkpoint_from_before_there_was_a_warmup(tmp_path: Path) -> None:
    """It goes on as it was; with a warm-up it is another run."""
    run = simulated(SHORT, tmp_path / "run")
    found = store.find(store.newest_first(run)[0])
    del found.manifest["run"]["warmup"]
    store.write_manifest(found.folder, found.manifest)
    with pytest.raises(UserError, match="warmup is 9, was 0"):
        simulated(f"{SHORT} --warmup 9 --resume {run}", tmp_path / "other")
    simulated(f"{SHORT} --iterations 60 --resume {run}", tmp_path / "longer")
    assert rows_of(tmp_path / "longer")[-1]["iteration"] == 60
