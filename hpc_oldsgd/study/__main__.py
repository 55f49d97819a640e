"""python -m hpc_oldsgd.study table1|speedup|..."""

from __future__ import annotations

from collections.abc import Sequence

from .. import cli

NAMES = (
    "table1", "costs", "collect", "speedup", "convergence", "scaling", "topologies", "stragglers",
    "tau", "weak", "scale", "timeline", "rivals", "wires", "pack",
)  # fmt: skip
"""Each a module with Options and main(options)."""


def main(argv: Sequence[str] | None = None) -> None:
    cli.dispatch("hpc_oldsgd.study", NAMES, "The paper's tables and figures.", argv)


if __name__ == "__main__":
    main()
