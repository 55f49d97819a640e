"""What theory says about a graph before a run.

`bound` has the step-size rule and the convergence bound of OLDSGD. `disagreement` says how far the
agents are apart under LDSGD, OLDSGD, OLDSGD in fragments and xoldsgd. `damping` has the stability
of xoldsgd and the gamma that suits a graph. docs/theory.md derives all of it.
"""

from .bound import Problem, bound, bound_terms, constants, max_step_size, step_size_limits
from .command import Options, main
from .damping import (
    correction_rounds,
    critical_damping,
    damping,
    gamma_limit,
    memory_rounds,
    noise_growth,
)
from .disagreement import Size, disagreement, drift, noise
from .modes import Flights, modes, roots, spectral_radius

__all__ = [
    "Flights",
    "Options",
    "Problem",
    "Size",
    "bound",
    "bound_terms",
    "constants",
    "correction_rounds",
    "critical_damping",
    "damping",
    "disagreement",
    "drift",
    "gamma_limit",
    "main",
    "max_step_size",
    "memory_rounds",
    "modes",
    "noise",
    "noise_growth",
    "roots",
    "spectral_radius",
    "step_size_limits",
]
