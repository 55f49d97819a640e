"""python -m hpc_oldsgd.bench mix|overlap|overhead ..."""

from .. import cli

NAMES = ("mix", "overlap", "overhead", "memory", "soak", "chaos")

if __name__ == "__main__":
    cli.dispatch("hpc_oldsgd.bench", NAMES, "Measurements, side by side in one run.")
