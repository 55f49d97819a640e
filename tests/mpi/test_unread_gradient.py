"""reads_gradient=False over MPI: the same refusal and the same descent as in the simulator."""

from __future__ import annotations

import pytest
import torch

from hpc_oldsgd.errors import UserError
from hpc_oldsgd.runtime.agent import Agent
from support.small_problems import cnn
from support.training_loops import Loop, agent_loop, simulated_loop
from support.unread_gradient import READS, OwnDirection, Reads


@pytest.mark.parametrize("how", READS)
def test_computing_with_it_is_refused(comm, how):
    model = cnn()
    optimizer, _ = Loop().make(model)
    agent = Agent(model, optimizer, Reads(how=how), "ring", comm)
    Loop().backward(model, optimizer, comm.rank, 0)
    with pytest.raises(UserError, match="reads_gradient"):
        agent.step()
    agent.finish()


def test_a_direction_that_is_not_the_gradient_is_descended_along(comm):
    history, _, _ = agent_loop(comm, Loop(), OwnDirection(), "ring")
    for k, X in enumerate(simulated_loop(comm, Loop(), OwnDirection(), "ring")):
        assert torch.equal(history[k], X[comm.rank]), f"step {k}"
