"""How snapshots get from agent to agent: over MPI, or stacked in one process."""
