"""python -m hpc_oldsgd.bench mix|overlap|overhead ..."""

from __future__ import annotations

import importlib
import sys

from .. import cli

NAMES = ("mix", "overlap", "overhead", "memory", "soak")

if __name__ == "__main__":
    asked = sys.argv[1:2]
    # The others are imported only where their names or help lines are needed.
    modules = {n: importlib.import_module(f".{n}", __package__) for n in asked if n in NAMES}
    if not modules:
        modules = {n: importlib.import_module(f".{n}", __package__) for n in NAMES}
    cli.dispatch(
        {name: (module.main, module.Options) for name, module in modules.items()},
        prog="hpc_oldsgd.bench",
        description="Measurements, side by side in one run.",
    )
