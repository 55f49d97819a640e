"""How processes are started: the launcher, Open MPI's settings, the device of a rank."""
