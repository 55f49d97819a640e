"""python -m hpc_oldsgd.study table1|speedup|..."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from .. import cli

NAMES = (
    "table1", "costs", "collect", "speedup", "convergence", "scaling", "topologies", "stragglers",
    "tau", "weak", "scale",
)  # fmt: skip
"""Each a module with Options and main(options)."""


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    asked = [name for name in argv[:1] if name in NAMES]
    modules = {name: importlib.import_module(f".{name}", __package__) for name in asked or NAMES}
    cli.dispatch(
        {name: (module.main, module.Options) for name, module in modules.items()},
        prog="hpc_oldsgd.study",
        description="The paper's tables and figures.",
        argv=argv,
    )


if __name__ == "__main__":
    main()
