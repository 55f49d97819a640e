"""The paper's tables and figures, each a command: python -m hpc_oldsgd.study NAME ..."""
