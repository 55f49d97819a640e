"""A setting that Open MPI reads when it starts: imported with the package, before mpi4py.MPI.

By default Open MPI sends a large message over TCP as one fragment. The answers that the other end
needs for its own message wait behind it on the same socket. As soon as ranks are out of step, the
two directions take turns, and less is hidden. Small fragments avoid this. A user's own value stays.
"""

from __future__ import annotations

import os
import sys

FRAGMENT = "OMPI_MCA_btl_tcp_rdma_pipeline_frag_size"
too_late = FRAGMENT not in os.environ and "mpi4py.MPI" in sys.modules
"""MPI was started before this package could set it."""
os.environ.setdefault(FRAGMENT, str(128 * 1024))
