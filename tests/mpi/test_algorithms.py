"""Every algorithm over MPI is the one in the simulator, bit for bit, and its paper's equations."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import algorithms, topology
from hpc_oldsgd.runtime.agent import Agent
from hpc_oldsgd.runtime.plain import Plain
from hpc_oldsgd.runtime.runner import Runner
from hpc_oldsgd.simulation.stacked import StackedTransport
from hpc_oldsgd.simulation.trajectory import trajectory
from hpc_oldsgd.study import __main__ as study
from hpc_oldsgd.topology import Topology
from hpc_oldsgd.transport.base import Transport
from hpc_oldsgd.transport.mpi import MpiTransport
from support import paper_equations

D, ALPHA, ROUNDS = 13, 0.05, 4
SETTINGS: list[tuple[str, torch.dtype, torch.dtype | None]] = [
    ("ring", torch.float64, None),
    ("torus", torch.float32, torch.bfloat16),
    ("one-peer-exponential", torch.float32, None),
    ("one-peer-ring", torch.bfloat16, None),
]


class Diagonal:
    """f_i(x) = sum_k a_ik (x_k - b_ik)^2 / 2 plus noise: elementwise, so a row has the same bits
    whether it is computed alone or with the others."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        random = np.random.default_rng(n)
        self.a, self.b, self.x0, self.noise = (
            torch.from_numpy(z).to(dtype)
            for z in (
                random.uniform(0.5, 2, (n, D)),
                3 * random.standard_normal((n, D)),
                random.standard_normal((n, D)),
                random.standard_normal((64, n, D)),
            )
        )

    def grad(self, x: torch.Tensor, rows: Any, t: int) -> torch.Tensor:
        return (x - self.b[rows]) * self.a[rows] + self.noise[t][rows]


def run(
    problem: Diagonal, rows: Any, algorithm: algorithms.Algorithm, transport: Transport
) -> list[torch.Tensor]:
    """x at every round boundary, the algorithm's state after it."""
    x = problem.x0[rows].clone()
    seen = []

    def boundary(runner: Runner) -> None:
        state = runner.algorithm.state_dict()
        seen.append(torch.stack([x, *(state[name].expand_as(x) for name in sorted(state))]))
        if runner.r == ROUNDS:
            runner.stop()

    runner = Plain(x, algorithm, transport, ALPHA)
    runner.on_round.append(boundary)
    runner.start()
    while not runner.finished:
        runner.advance(problem.grad(x, rows, runner.t))
    runner.finish()
    return seen[1:]  # at the top of round 0 the state is as it starts


def graphs(n: int) -> list[tuple[Topology, torch.dtype, torch.dtype | None]]:
    torus = n in (4, 9)  # the others have no rows and columns
    found = [(name, *types) for name, *types in SETTINGS if name != "torus" or torus]
    return [(topology.from_name(name, n), dtype, wire) for name, dtype, wire in found]


@pytest.mark.parametrize("name", algorithms.names())
def test_equals_the_simulator_bit_for_bit(name: str, comm: MPI.Comm) -> None:
    n, rank = comm.size, comm.rank
    for k, (graph, dtype, wire) in enumerate(graphs(n)):
        tau = (3, 1, 2)[k % 3] if len(paper_equations.taus(name)) > 1 else 1
        problem, algorithm = Diagonal(n, dtype), algorithms.get(name)(tau=tau)
        ours = run(problem, rank, algorithm, MpiTransport(comm, graph, wire=wire))
        theirs = run(problem, slice(None), algorithm, StackedTransport(graph, wire=wire))
        assert len(ours) == len(theirs) == ROUNDS
        for r, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b[:, rank]), f"{graph}, {dtype}, round {r + 1}"
        if dtype == torch.float64:
            expected = paper_equations.ALL[name](
                problem.x0.numpy(),
                lambda X, t: problem.grad(torch.tensor(X), slice(None), t).numpy(),  # noqa: B023
                graph.matrix,
                ALPHA,
                tau,
                ROUNDS,
            )
            mpi = np.array([a[0].numpy() for a in ours])
            np.testing.assert_allclose(mpi, expected[1:, rank], rtol=0, atol=1e-10)


class Vector(torch.nn.Module):
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(x.clone())


@pytest.mark.max_ranks(4)  # a first optimizer of torch costs every rank two seconds
@pytest.mark.parametrize("name", algorithms.names())
def test_trains_a_module_with_an_optimizer(name: str, comm: MPI.Comm) -> None:
    """The drop-in hands every schedule the gradients, and the optimizer what the schedule asks."""
    n, rank, tau = comm.size, comm.rank, paper_equations.taus(name)[-1]
    problem, model = Diagonal(n, torch.float64), Vector(Diagonal(n, torch.float64).x0[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=ALPHA)
    algorithm = algorithms.get(name)(tau=tau)
    with Agent(model, optimizer, algorithm, "ring", comm, sync=False) as agent:
        while agent.r < ROUNDS:
            optimizer.zero_grad()
            loss = (problem.a[rank] * (model.x - problem.b[rank]) ** 2).sum() / 2
            (loss + (problem.noise[agent.t][rank] * model.x).sum()).backward()
            agent.step()
    expected = paper_equations.ALL[name](
        problem.x0.numpy(),
        lambda X, t: problem.grad(torch.tensor(X), slice(None), t).numpy(),
        topology.from_name("ring", n).matrix,
        ALPHA,
        tau,
        ROUNDS,
    )
    np.testing.assert_allclose(model.x.detach().numpy(), expected[-1, rank], rtol=0, atol=1e-10)


@pytest.mark.max_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", algorithms.names())
def test_the_drop_in_equals_a_trajectory_bit_for_bit(
    name: str, dtype: torch.dtype, comm: MPI.Comm
) -> None:
    """Of a model that is one vector, with torch's own SGD; 13 numbers fill no vector register."""
    n, rank, tau = comm.size, comm.rank, paper_equations.taus(name)[-1]
    problem, algorithm = Diagonal(n, dtype), algorithms.get(name)(tau=tau)
    model = Vector(problem.x0[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=ALPHA)
    with Agent(model, optimizer, algorithm, "ring", comm, sync=False) as agent:
        while agent.r < ROUNDS:
            model.x.grad = problem.grad(model.x.detach(), rank, agent.t)
            agent.step()

    def grad(i: int, x: np.ndarray, k: int) -> np.ndarray:
        return problem.grad(torch.from_numpy(x), i, k).numpy()

    whole = trajectory(algorithm, "ring", problem.x0.numpy(), grad, ALPHA, ROUNDS)
    assert np.array_equal(model.x.detach().numpy(), whole.X[-1, rank])


def test_table1_from_real_messages(
    comm: MPI.Comm, mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--quick", "--model-bytes", "40000", "--grad-seconds", "0.01", "--rounds", "2")
    chosen = ("--algorithm", "oldsgd", "kgt", "lsgd", "--tau", "2")
    study.main(["table1", "--mpi", *small, *chosen, "--out", str(mpi_tmp_path)])
    comm.Barrier()
    assert ("alone: gradient" in capsys.readouterr().out) == (comm.rank == 0)
    rows = list(csv.DictReader((mpi_tmp_path / "table1.csv").open()))
    assert [r["algorithm"] for r in rows] == ["oldsgd", "oldsgd, P = tau", "kgt", "lsgd"]
    for row in rows:
        assert float(row["measured"]) >= 0.02  # two gradients
        assert float(row["expected"]) >= 0.02
        assert int(row["n"]) == comm.size
