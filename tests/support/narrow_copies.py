"""The public copies of the difference wire, at both ends of every edge."""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpc_oldsgd.transport.mpi import MpiTransport


def copies_agree(comm: MPI.Comm, transport: MpiTransport) -> None:
    """What every neighbour holds of this rank is this rank's own, bit for bit."""
    assert transport.streams is not None
    streams = transport.streams._known
    told = comm.allgather({k: (s.z, s.copies) for k, s in streams.items()})
    for name, stream in streams.items():
        for j in stream.copies:
            assert torch.equal(told[j][name][1][comm.rank], stream.z), (name, j)
    assert sum(len(s.copies) for s in streams.values()) > 0
