"""One agent's model and the schedule that drives it."""
