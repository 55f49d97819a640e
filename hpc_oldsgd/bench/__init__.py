"""Benchmarks: `python -m hpc_oldsgd.bench NAME`; a module here has an Options and a main."""

from pathlib import Path

SLOW_NET = Path(__file__).with_name("slow_net.sh")
"""A program: a slow network on one machine, for as long as a command runs."""
