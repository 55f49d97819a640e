"""Save and resume in a loop of one's own: the resumed run is the run that never stopped."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpc_oldsgd import OLDSGD, Agent, UserError, algorithms
from hpc_oldsgd.algorithms import KGT, LDSGD
from support.small_problems import batch, cnn
from support.training_loops import Loop


@pytest.fixture
def shared(comm, tmp_path) -> Path:
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


class Noisy(nn.Module):
    """cnn with dropout, so that the random generator matters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = cnn(seed=seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + np.random.rand()
        return self.body(nn.functional.dropout(x, 0.3)) * (1 + noise)


def train(comm: Any, algorithm: Any, folder: Path, first: int, last: int, seed: int = 0) -> Any:
    """Steps first to last; saved where at_boundary says so after step 6, loaded if first is not 0.

    What is different in a new process is different here: weights, optimizer, random generators.
    """
    model = Noisy(seed)
    plain = getattr(algorithm, "form", "") == "gradient"
    optimizer, scheduler = Loop("sgd" if plain else "momentum").make(model)
    scheduler.step_size = 3  # the step size of a round of the paper's form must not change
    torch.manual_seed(seed + comm.rank), random.seed(seed), np.random.seed(seed)
    with Agent(model, optimizer, algorithm, "one-peer-ring", comm, sync=True) as agent:
        if first:
            assert agent.load(folder, scheduler=scheduler) == {"epoch": 7, "note": "six"}
            assert agent.t == first
        for k in range(first, last):
            optimizer.zero_grad()
            x, y = batch(comm.rank, k)
            nn.functional.cross_entropy(model(x), y).backward()
            agent.step()
            scheduler.step()
            if agent.at_boundary and agent.t == 6:
                agent.save(folder, scheduler=scheduler, epoch=7, note="six")
    return agent, optimizer, scheduler


@pytest.mark.max_ranks(3)
@pytest.mark.parametrize("name", algorithms.names())
def test_a_saved_loop_goes_on_as_if_it_had_never_stopped(comm, shared, name):
    cls = algorithms.get(name)
    algorithm = cls() if cls().tau == 1 else cls(tau=3)
    whole, _, scheduler = train(comm, algorithm, shared, 0, 12)
    resumed, _, later = train(comm, algorithm, shared, 6, 12, seed=5)
    assert (resumed.t, resumed.r) == (whole.t, whole.r)
    for (key, a), b in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), key  # frozen weights and num_batches_tracked, too
    assert later.state_dict() == scheduler.state_dict()


def test_saving_where_it_would_be_wrong_is_refused(comm, shared):
    model = cnn()
    optimizer, scheduler = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:

        def early(agent: Any) -> None:
            if agent.r == 1:
                with pytest.raises(UserError, match=r"in on_round comes before scheduler\.step"):
                    agent.save(shared, scheduler=scheduler)

        agent.on_round.append(early)
        for k in range(4):
            Loop().backward(model, optimizer, comm.rank, k)
            agent.step()
            if agent.t in (2, 4):
                assert agent.at_boundary
                with pytest.raises(UserError, match="scheduler is one step behind the agent"):
                    agent.save(shared, scheduler=scheduler)
            else:
                assert not agent.at_boundary
                with pytest.raises(UserError, match="between two rounds"):
                    agent.save(shared, scheduler=scheduler)
            scheduler.step()
        assert not list(shared.glob("step-*"))
        comm.Barrier()
        agent.save(shared, scheduler=scheduler)


def test_a_checkpoint_that_not_all_have_written_is_not_taken(comm, shared):
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=1), "ring", comm) as agent:
        with pytest.raises(UserError, match="holds no checkpoint that all"):
            agent.load(shared / "nothing")
        for k in range(2):
            Loop().backward(model, optimizer, comm.rank, k)
            agent.step()
            agent.save(shared, k=k)
            comm.Barrier()
            assert len(list(shared.glob("step-*"))) == comm.size  # the older ones are gone
            comm.Barrier()
        saved = agent.x.clone()
        if comm.rank == 0 and comm.size > 1:  # the job died before the others wrote theirs
            copied = shared / "step-3-rank-0.safetensors"
            shutil.copy(shared / "step-2-rank-0.safetensors", copied)
        comm.Barrier()
        Loop().backward(model, optimizer, comm.rank, 2)
        agent.step()
        assert agent.load(shared) == {"k": 1}
        assert agent.t == 2 and torch.equal(agent.x, saved)
        with pytest.raises(UserError, match="holds no scheduler"):
            agent.load(shared, scheduler=optimizer)
        with pytest.raises(UserError, match=r"also\.odd is a PosixPath.*give things with a state_"):
            agent.save(shared, odd=Path("a"))
        (shared / f"step-2-rank-{comm.rank}.safetensors").write_bytes(b"not a checkpoint")
        with pytest.raises(UserError, match="the checkpoint is damaged"):
            agent.load(shared)


def other_tau(agent: Any) -> Any:
    return OLDSGD(tau=3), cnn()


def other_algorithm(agent: Any) -> Any:
    return KGT(tau=2), cnn()


def other_model(agent: Any) -> Any:
    model = cnn()
    model[10] = nn.Linear(7, 3, bias=False)
    return OLDSGD(tau=2), model


@pytest.mark.parametrize(
    "other, message",
    [
        (other_tau, r"saved under OLDSGD\(tau=3.* this Agent runs OLDSGD\(tau=2"),
        (other_algorithm, r"saved under KGT"),
        (other_model, r"another model's: it has .* where this model has 10\.bias"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(comm, other, message):
    algorithm, model = other(None)
    agent = Agent(model, Loop().make(model)[0], algorithm, "ring", comm)
    state = copy.deepcopy(agent.state_dict())
    agent.finish()
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        before = agent.x.clone()
        with pytest.raises(UserError, match=message):
            agent.load_state_dict(state)
        with pytest.raises(UserError, match="not an Agent's state"):
            agent.load_state_dict(model.state_dict())
        assert torch.equal(agent.x, before)
        Loop().backward(model, optimizer, comm.rank, 0)
        agent.step()


@pytest.mark.mpi(min_size=2)
def test_a_state_of_another_rank_is_refused(comm):
    model = cnn()
    with Agent(model, Loop().make(model)[0], LDSGD(tau=2), "ring", comm) as agent:
        other = comm.sendrecv(agent.state_dict(), 1 - comm.rank) if comm.rank < 2 else None
        state = other or agent.state_dict()
        with pytest.raises(UserError, match="the state is that of rank"):
            agent.load_state_dict(state)


def test_a_state_of_the_first_version_is_taken(comm):
    model = cnn()
    with Agent(model, Loop().make(model)[0], OLDSGD(tau=2), "ring", comm) as agent:
        state = copy.deepcopy(agent.state_dict())
        del state["outside"], state["made"]
        agent.load_state_dict(state)


def test_a_local_step_is_no_place_for_a_checkpoint(comm):
    model = cnn()
    optimizer, _ = Loop().make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        Loop().backward(model, optimizer, comm.rank, 0)
        agent.local_step()
        with pytest.raises(UserError, match=r"steps since the last one: 1.*agent\.at_boundary"):
            agent.state_dict()
        for k in range(2):
            Loop().backward(model, optimizer, comm.rank, k)
            agent.step()
        agent.state_dict()


def test_a_part_saved_by_itself_is_small(comm, shared):
    """A part's own state_dict shares x's memory, and torch.save writes all of it."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        mean = agent.mean_state_dict()
        part = {k: v for k, v in mean.items() if k.startswith("1.")}
        path = shared / f"part-{comm.rank}.pt"
        torch.save(part, path)
        assert path.stat().st_size < 10_000 < 4 * agent.flat.d
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(mean[key], tensor)
            assert mean[key].data_ptr() != tensor.data_ptr()


@pytest.mark.mpi(min_size=2)
def test_states_of_different_steps_are_refused(comm):
    """As when each rank takes its own newest checkpoint: all say so, and nothing was loaded."""
    model = cnn()
    optimizer, _ = Loop("sgd").make(model)
    with Agent(model, optimizer, OLDSGD(tau=2), "ring", comm) as agent:
        states = []
        for k in range(4):
            optimizer.zero_grad()
            x, y = batch(comm.rank, k)
            nn.functional.cross_entropy(model(x), y).backward()
            agent.step()
            if agent.at_boundary:
                states.append(copy.deepcopy(agent.state_dict()))
        before = agent.x.clone()
        with pytest.raises(UserError, match=r"ranks would go on from different steps \(4, 2"):
            agent.load_state_dict(states[0 if comm.rank == 1 else 1])
        assert agent.t == 4 and torch.equal(agent.x, before)
