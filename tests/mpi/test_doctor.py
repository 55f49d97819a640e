"""The doctor over MPI: every edge measured once, payloads compared, bytes counted."""

from __future__ import annotations

import runpy
import sys

import numpy as np
import pytest
from mpi4py import MPI

from hpc_oldsgd import topology
from hpc_oldsgd.doctor import links
from hpc_oldsgd.transport.mpi import link_probe

pytestmark = pytest.mark.ranks(1, 4)


def test_every_edge_once(comm: MPI.Comm) -> None:
    edges = links.edges_of(topology.from_name("complete", comm.size))
    hosts = [f"host{i % 2}" for i in range(comm.size)]
    found = links.alone(comm, edges, hosts, largest=5001)
    assert [tuple(link["edge"]) for link in found] == edges
    assert all(link["intact"] and link["bytes"] <= 5001 for link in found)
    assert all(link["latency_s"] > 0 and link["bytes_per_s"] > 0 for link in found)
    seen = links.at_once(comm, found, hosts, hosts)
    counted = {kind: seen[kind]["edges"] for kind in seen}
    within = sum(hosts[i] == hosts[j] for i, j in edges)
    expected = {"within a host": within, "between hosts": len(edges) - within}
    assert counted == {kind: k for kind, k in expected.items() if k}
    assert all(link["at_once_bytes_per_s"] > 0 for link in found)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("nbytes", [1, 7, 8, 65537])
def test_a_changed_payload_is_noticed(
    comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    peer = comm.rank ^ 1
    if peer < comm.size:
        assert link_probe.ping(comm, peer, nbytes, 2)[1]
    right = link_probe.pattern

    def wrong(rank: int, nbytes: int) -> link_probe.Bytes:
        made = right(rank, nbytes)
        if comm.rank == rank == 1:  # what rank 1 sends; the others know what it should be
            made[-1] ^= np.uint8(1)
        return made

    monkeypatch.setattr(link_probe, "pattern", wrong)
    if peer < comm.size:
        assert link_probe.ping(comm, peer, nbytes, 2)[1] == (comm.rank != 0)


def test_patterns_differ() -> None:
    made = [link_probe.pattern(i, 1000).tobytes() for i in range(4)]
    assert len(set(made)) == 4 and made[0][:496] != made[0][8:504]


@pytest.mark.ranks(3, 3)
def test_a_graph_that_does_not_fit(
    comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpc_oldsgd.doctor", "--topology", "hypercube"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hpc_oldsgd.doctor", run_name="__main__")
    said = capfd.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    assert said.count("hpc_oldsgd.doctor: A hypercube needs") == (comm.rank == 0)
