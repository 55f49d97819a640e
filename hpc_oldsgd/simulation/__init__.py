"""All agents in one process, in simulated time."""
