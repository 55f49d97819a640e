"""The same run in one process and in simulated time: python -m hpc_oldsgd.simulate

`trajectory` does it for a gradient function of one's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import cli
from .cli.console import Console
from .runs import spec
from .runs.backend import Stacked
from .runs.session import Session
from .runs.spec import Spec
from .simulation.trajectory import Trajectory, trajectory
from .study.compare import compare
from .training.options import SimulateOptions
from .training.signals import Inbox

__all__ = ["Trajectory", "main", "run", "trajectory"]

PROG = "hpc_oldsgd.simulate"


def main() -> None:
    with cli.guard(PROG):
        if "all" in cli.values_of(sys.argv, "algorithm"):
            compare(sys.argv[1:])
            return
        asked = spec.parse(SimulateOptions, PROG)
        signals = Inbox(asked.options.on_signal)
        signals.install()
        run(asked, signals)


def run(asked: Spec[SimulateOptions], signals: Inbox | None = None, **hooks: Any) -> Path:
    session = Session(asked, Stacked(asked.options), Console(PROG), signals=signals, **hooks)
    session.run()
    return session.plan.path


if __name__ == "__main__":
    main()
