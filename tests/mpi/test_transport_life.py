"""A transport's start and end, its clock, and neighbours that are late."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.errors import NeighbourTimeout, UserError
from hpc_oldsgd.launch import device
from hpc_oldsgd.transport.mpi import MpiTransport, cuda_child, cuda_probe, job
from hpc_oldsgd.transport.progress import Engine, PythonEngine, PythonJob, Stage
from support.message_ways import FAST, WAYS, D, every_way, mixed
from support.small_problems import rows


def test_a_topology_of_another_size_is_refused(comm):
    with pytest.raises(UserError, match="the topology has"):
        MpiTransport(comm, topology.from_name("ring", comm.size + 1))


@pytest.mark.max_ranks(1)
def test_a_world_of_one_among_several_processes_is_refused(comm, monkeypatch):
    """Two MPIs mixed: every process would train alone."""
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(UserError, match="started 2 processes but MPI sees a world of 1"):
        MpiTransport(comm, topology.from_name("ring", 1))


def test_a_transport_dropped_in_flight_keeps_what_mpi_writes_into(comm):
    transport = MpiTransport(comm, topology.from_name("ring", comm.size))
    transport.exchange(torch.ones(D), 0)
    dropped = weakref.ref(transport)
    del transport
    gc.collect()
    kept = dropped()
    assert kept is not None
    kept.close()
    del kept
    gc.collect()
    assert dropped() is None


def test_a_rank_that_is_bound_has_its_cores_to_itself(comm, monkeypatch):
    """As srun --cpu-bind=cores --cpus-per-task=3 leaves it; unbound ranks share theirs."""
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    own = {3 * comm.rank + k for k in range(3)}
    for cores in (own, set(range(3 * comm.size))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        device.set_threads(0, job.Startup(comm).sharing)
    assert set_to == [3, 3]


def test_the_probe_for_device_memory_needs_every_payload_intact(comm, monkeypatch):
    cpu = torch.device("cpu")
    assert cuda_probe.arrives(comm, cpu)
    assert not cuda_probe.cuda_aware(comm, cpu)
    real = cuda_probe.pass_around

    def torn(comm: MPI.Comm, sent: torch.Tensor, received: torch.Tensor, engine: Engine) -> bool:
        came = real(comm, sent, received, engine)
        if comm.rank == comm.size - 1:
            received[-1] += 1
        return came

    monkeypatch.setattr(cuda_probe, "pass_around", torn)
    assert not cuda_probe.arrives(comm, cpu)  # on every rank alike


def test_the_probe_ends_where_nothing_arrives(comm, monkeypatch):
    """Some MPIs wait for ever. The last rank's engine never moves its messages."""

    class Stuck(PythonEngine):
        def submit(self, stages: Sequence[Stage]) -> PythonJob:
            return PythonJob(stages) if comm.rank == comm.size - 1 else super().submit(stages)

    monkeypatch.setattr(cuda_probe, "LIMIT_S", 0.2)
    assert not cuda_probe.arrives(comm, torch.device("cpu"), Stuck(threaded=False))
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(2)
def test_a_crash_of_the_probe_costs_a_child_process(comm):
    """Which is no rank of this job, and moves what it is given by a thread of its own."""
    assert cuda_child.why_not("host") == ""
    assert cuda_child.why_not("unmapped").startswith("a trial ")
    assert "0.001 s" in cuda_child.why_not("host", limit_s=0.001)


@every_way
def test_drain_and_close_complete_what_is_open(comm, way):
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("ring", n), **way)
    X = rows(n, D)
    x = X[i].clone()
    for k in range(3):
        transport.exchange(x, 0)
        transport.all_reduce(x, 0)
        transport.drain()
        assert [record.kind for record in transport.records] == ["exchange", "all_reduce"] * (k + 1)
    flight = transport.exchange(x, 0)
    flight.wait()
    flight.wait()
    flight.mix_into(x)
    assert torch.equal(x, mixed("ring", X, 0)[i])
    transport.exchange(x, 1)
    transport.close()
    transport.close()


def test_a_closed_transport_says_so(comm):
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), **FAST)
    x = torch.zeros(3)
    transport.all_reduce(x, 0).mean(x)
    transport.close()
    for call in (transport.exchange, transport.all_reduce):
        with pytest.raises(UserError, match="has finished"):
            call(x, 0)
    with pytest.raises(UserError, match="has finished"):
        transport.reduce(np.zeros(1))


@every_way
def test_flights_are_timed(comm, way):
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), **way)
    x = torch.ones(D)
    for round in range(3):
        before = time.perf_counter()
        flight = transport.exchange(x, round)
        time.sleep(0.03)
        transport.computed()
        start = time.perf_counter()
        flight.mix_into(x)
        after = time.perf_counter()
        record = transport.records[-1]
        assert (record.kind, record.round) == ("exchange", round)
        assert before <= record.posted <= record.completed <= after
        assert 0 <= record.exposed <= after - start
    transport.all_reduce(x, 3).mean(x)
    assert transport.records[-1].kind == "all_reduce"
    transport.close()


@pytest.mark.max_ranks(1)
def test_a_limit_ends_the_job_once_it_is_over(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(job, "end_job", lambda comm, text, code: said.append(text))
    with pytest.raises(ZeroDivisionError), job.limit(60, "to fail"):
        raise ZeroDivisionError
    with job.limit(0.05, "to wake up"):
        while not said:
            time.sleep(0.01)
    assert said == ["rank 0 has waited 0 s to wake up\n"]  # the other one was called off


@pytest.mark.parametrize("level", [MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED])
def test_polling_keeps_to_the_thread_that_may_call_mpi(comm, monkeypatch, level):
    """On a device hooks of the backward pass run in autograd's own thread."""
    transport = MpiTransport(comm, topology.from_name("ring", comm.size), progress="poll")
    callers: list[str] = []
    monkeypatch.setattr(
        transport.engine, "poll", lambda: callers.append(threading.current_thread().name)
    )
    monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    autograd = threading.Thread(target=transport.poll, name="autograd")
    autograd.start()
    autograd.join()
    time.sleep(0.01)  # it does not poll twice within a millisecond
    transport.poll()
    main = threading.current_thread().name
    assert callers == ([main] if level == MPI.THREAD_FUNNELED else ["autograd", main])
    monkeypatch.undo()
    transport.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[-1]])
def test_a_late_rank_is_named(comm, way):
    """Rank 1 is late; its neighbours say so, and go on once it is there."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("complete", n), timeout_s=0.4, **way)
    comm.Barrier()
    x = rows(n, D)[i]
    if i != 1:
        flight = transport.exchange(x, 7)
        # On a busy machine others may be late too.
        said = rf"rank {i} \(.+\) has waited .* s for .*rank 1 \(.+\) in round 7"
        with pytest.raises(NeighbourTimeout, match=said):
            flight.wait()
    comm.Barrier()  # everybody has said so
    if i == 1:
        flight = transport.exchange(x, 7)
    transport.timeout_s = None
    flight.mix_into(x)
    assert torch.equal(x, mixed("complete", rows(n, D), 0)[i])
    transport.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.max_ranks(3)
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[-1]])
def test_nobody_is_late_while_the_agent_computes(comm, way):
    """The limit counts the time an agent stands waiting, not the time its message takes."""
    n, i = comm.size, comm.rank
    transport = MpiTransport(comm, topology.from_name("complete", n), timeout_s=1.5, **way)
    comm.Barrier()
    if i == 1:
        time.sleep(2.0)
    x = rows(n, D)[i]
    flight = transport.exchange(x, 0)
    comm.Barrier()  # the others' computation
    if transport.progress == "none":  # nothing moves before the wait, which may then take long
        transport.timeout_s = 60.0
    while transport.progress != "none" and not flight.done():  # however busy the machine is
        transport.poll()
        time.sleep(0.001)
    flight.mix_into(x)
    assert torch.equal(x, mixed("complete", rows(n, D), 0)[i])
    transport.close()


@pytest.mark.parametrize(
    "wrong", [{"progress": "threads"}, {"staging": "pinned"}, {"all_reduce": "nccl"}]
)
def test_a_misspelt_option_is_refused(comm, wrong):
    """It would be taken for another one, and the overlap be off without a word."""
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} is one of .*, not"):
        MpiTransport(comm, topology.from_name("ring", comm.size), **wrong)
