"""Benchmarks: `python -m hpc_oldsgd.bench NAME`; a module here has an Options and a main."""
