"""What this machine's MPI, network, GPUs and cores really do, and what to do about it."""
