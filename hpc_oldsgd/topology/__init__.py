"""Graphs of agents -> the mixing matrix W, lambda_2 and p = 1 - lambda_2^2.

topology.from_name("ring", 9).neighbours(0)   # ((1, 0.333...), (8, 0.333...))
"""

from .build import (
    NAMES,
    WEIGHTS,
    from_file,
    from_matrix,
    from_name,
    from_networkx,
)
from .core import Topology

__all__ = ["NAMES", "WEIGHTS", "Topology", "from_file", "from_matrix", "from_name", "from_networkx"]
