"""Our plain SGD against torch's."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from hpc_oldsgd.runtime import sgd


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bits_of_torch(dtype: torch.dtype, weight_decay: float) -> None:
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)
    theirs = copy.deepcopy(ours)
    ours[2].bias.requires_grad_(False)  # never has a gradient
    theirs[2].bias.requires_grad_(False)
    mine = sgd.SGD(ours.parameters(), lr=0.3, weight_decay=weight_decay)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.3, weight_decay=weight_decay)
    for k in range(5):
        x = torch.randn(4, 7, dtype=dtype)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad(set_to_none=k % 2 == 0)
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_its_state_is_torchs() -> None:
    p = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    saved = torch.optim.SGD(p, lr=0.25, weight_decay=0.5).state_dict()
    mine = sgd.SGD(p, lr=1.0)
    mine.load_state_dict(saved)
    assert mine.param_groups[0]["lr"] == 0.25 and mine.param_groups[0]["weight_decay"] == 0.5
    theirs = torch.optim.SGD(p, lr=1.0)
    theirs.load_state_dict(mine.state_dict())
    assert theirs.state_dict()["param_groups"][0]["lr"] == 0.25


def test_a_run_loads_no_compiler(tmp_path) -> None:
    """The reason for it."""
    code = "import sys; from hpc_oldsgd import train; train.main(); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    words = ["--task", "logistic", "--iterations", "4", "--out", str(tmp_path / "run")]
    job = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
