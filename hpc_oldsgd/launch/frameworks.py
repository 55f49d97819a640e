"""Training frameworks that take mpirun's variables for an order to start torch.distributed.

Accelerate does so on a CPU, also inside Hugging Face's Trainer. It then asks for MASTER_ADDR, which
is of no use here: `hpc_oldsgd.integrations.start()` keeps the variables from it.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from .launcher import launcher_rank, launcher_size


def explained(error: BaseException, tb: TracebackType | None) -> str:
    """What to say of an error of Accelerate about mpirun's variables; nothing of any other."""
    if "MASTER_ADDR" not in str(error) or "accelerate" not in sys.modules or launcher_size() == 1:
        return ""
    called = traceback.extract_tb(tb, limit=1)
    where = f"{called[0].filename}, line {called[0].lineno}: " if called else ""
    return (
        f"{where}Accelerate takes the variables of mpirun for its own. Call "
        "hpc_oldsgd.integrations.start() before you make the Accelerator or the TrainingArguments"
    )


def explain_at_exit() -> None:
    """In place of one long traceback a rank: one line. Before an Agent is made nobody else does."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        said = explained(error, tb)
        if not said:
            usual(kind, error, tb)
        elif launcher_rank() == 0:  # all ranks have these variables
            sys.stderr.write(f"hpc_oldsgd: {said}\n")

    sys.excepthook = hook


if launcher_size() > 1:
    explain_at_exit()
