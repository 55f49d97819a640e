"""A setting that Open MPI reads when it starts: imported with the package, before mpi4py.MPI.

Over TCP a receiver asks for a large message piece by piece, four pieces ahead. What it asks waits
behind its own data on the same connection: with large pieces the two directions take turns as soon
as ranks are out of step, and less is hidden. By default a piece is the whole message. Small ones
avoid this (docs/overlap.md has the measurements). A user's own value stays.
"""

from __future__ import annotations

import os
import sys

FRAGMENT = "OMPI_MCA_btl_tcp_rdma_pipeline_frag_size"
BYTES = str(64 * 1024)
too_late = FRAGMENT not in os.environ and "mpi4py.MPI" in sys.modules
"""MPI was started before this package could set it."""
os.environ.setdefault(FRAGMENT, BYTES)
