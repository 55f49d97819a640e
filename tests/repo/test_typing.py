"""A user's script is checked against the package's types, from a wheel and an editable install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hpc_oldsgd
from support import ROOT
from support.wheels import built

SCRIPT = """
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_oldsgd
from hpc_oldsgd import OLDSGD, Agent, Topology, UserError, fused_mix_delta
from hpc_oldsgd.algorithms import KGT

version: str = hpc_oldsgd.__version__
model = nn.Linear(3, 2)
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader: DataLoader[tuple[Tensor, ...]] = DataLoader(TensorDataset(torch.ones(4, 3)))
with Agent(model, inner, OLDSGD(tau=5), topology="ring", wire="bf16", sync=True) as agent:
    optimizer: torch.optim.Optimizer = agent.as_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    values = agent.load("checkpoint", scheduler=scheduler)
    for (x,) in agent.batches(loader, until="longest"):
        loss: Tensor = model(x).sum()
        loss.backward()
        going_on: bool = agent.step()
        if agent.at_boundary:
            agent.save("checkpoint", scheduler=scheduler, epoch=1)
        hidden: float = agent.metrics()["hidden"]
    with agent.mean_weights():
        model.eval()
    torch.save(agent.mean_state_dict(), "model.pt")
    agent.rebuild()
    agent.on_round.append(lambda a: a.stop())
"""
# torch's own Tensor.backward has no types.
STRICT = ("--strict", "--allow-untyped-calls", "--no-error-summary")
WRONG = {
    'Agent(model, inner, OLDSGD(tau="5"))': "arg-type",
    'agent.batches(loader, until="middle")': "arg-type",
    "agent.stepp()": "attr-defined",
}


def mypy(script: Path, python: Path, cache: Path) -> str:
    options = [*STRICT, "--python-executable", str(python), "--cache-dir", str(cache)]
    shown = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(script)],
        cwd=script.parent,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
    )
    return shown.stdout + shown.stderr


@pytest.mark.slow
def test_a_users_script_is_accepted_and_its_mistakes_are_found(tmp_path: Path) -> None:
    for hook in ("build_wheel", "build_editable"):
        folder = tmp_path / hook
        kept = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "hpc_oldsgd", folder / "tree" / "hpc_oldsgd", ignore=kept)
        wheel = built(folder / "tree", hook)
        venv.create(folder / "venv", symlinks=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        zipfile.ZipFile(wheel).extractall(site)
        assert (site / "hpc_oldsgd").exists() == (hook == "build_wheel")
        script = folder / "script.py"
        script.write_text(SCRIPT + "\n".join(WRONG) + "\n")
        # One cache: mypy reads torch, by far the most of its work, once.
        lines = mypy(script, folder / "venv" / "bin" / "python", tmp_path / "cache").splitlines()
        first = SCRIPT.count("\n") + 1
        found = [(int(line.split(":")[1]), line.rpartition("[")[2][:-1]) for line in lines]
        assert found == list(enumerate(WRONG.values(), first)), lines


def test_the_version_is_the_packages() -> None:
    assert hpc_oldsgd.__version__ == metadata.version("hpc_oldsgd")
    assert "__version__" in dir(hpc_oldsgd)
