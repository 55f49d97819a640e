"""Settings of all tests, and what several of them use."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

from support import PYTHONPATH, ROOT, fast_disk

# Machines are noisy, so no deadlines; the same examples in every run and on every rank.
hypothesis.settings.register_profile("here", deadline=None, derandomize=True, database=None)
# make fuzz: many cases, others every time; a failure is shown with what reproduces it.
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write tests/golden/*.npz anew from this run instead of comparing with them",
    )


def pytest_configure() -> None:
    if os.environ.get("HPC_OLDSGD_REQUIRE_NATIVE") == "1":  # CI: or its tests would be skipped
        from hpc_oldsgd import ops

        if not ops.native_available():
            raise pytest.UsageError(f"the extension is required: {ops.build_info()['reason']}")


def pytest_collection_finish() -> None:
    # torch leaves a million objects; looking through them at every collection costs minutes when
    # nine ranks share two cores.
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Sums in torch's own kernels may depend on the number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def prompt_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_disk.make_prompt(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all random cases of a test: hypothesis makes no fixture anew for each."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpirun(n, "script.py", ...)` starts a job of its own; for tests of one process only."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    command = os.environ.get("MPIRUN") or (str(own) if own.exists() else shutil.which("mpirun"))
    if not command:
        pytest.skip("there is no mpirun")

    def run(
        n: int, *args: str | Path, timeout_s: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            # Ended by a signal, mpirun ends its ranks too; a killed one would leave them behind.
            ["timeout", str(timeout_s), command, "-n", str(n), sys.executable, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s + 30,
        )

    return run
