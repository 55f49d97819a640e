"""In PYTHONPATH: a run waits in its middle, at its first start, for the signal that is to stop it.

Without it the run might be over, on a fast machine, before Slurm has got round to it.
"""

from __future__ import annotations

import os
import sys
import time

ROUND = 200
LIMIT_S = 300.0

if "hpc_oldsgd.train" in sys.orig_argv and "SLURM_RESTART_COUNT" not in os.environ:
    from hpc_oldsgd.training.signals import Inbox

    take, asked = Inbox.take, 0

    def held(inbox: Inbox) -> set[str]:
        """Called once a round."""
        global asked
        asked += 1
        limit = time.monotonic() + LIMIT_S
        while asked == ROUND and not inbox._asked and time.monotonic() < limit:
            time.sleep(0.01)
        return take(inbox)

    Inbox.take = held  # type: ignore[method-assign]
