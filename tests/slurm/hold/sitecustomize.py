"""In PYTHONPATH: a run waits in its middle, at its first start, for the signal that stops it.

Without it the run might be over, on a fast machine, before Slurm has got round to it.
"""

import os
import sys

if "hpc_oldsgd.train" in sys.orig_argv and "SLURM_RESTART_COUNT" not in os.environ:
    from support import faults

    faults.hold_for_a_signal()
