"""A setting that Open MPI reads when it starts: imported with the package, before mpi4py.MPI.

Over TCP Open MPI sends a large message as one fragment unless told, and what the other end must
answer for a message of its own waits behind it on the same socket: as soon as ranks are out of
step the two directions take turns, and hiding ends. A user's own value stays.
"""

from __future__ import annotations

import os
import sys

FRAGMENT = "OMPI_MCA_btl_tcp_rdma_pipeline_frag_size"
too_late = FRAGMENT not in os.environ and "mpi4py.MPI" in sys.modules
"""MPI was started before this package could set it."""
os.environ.setdefault(FRAGMENT, str(128 * 1024))
