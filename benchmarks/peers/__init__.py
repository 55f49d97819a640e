"""Ours beside what a user would pick instead, on one network in one run.

    python -m benchmarks.peers                                  # makes its own slow network (root)
    mpirun -n 4 python -m benchmarks.peers.worker               # the network that is there

Every contestant is a few lines of `entries.py`, written as its users write it; all share one model,
one gradient, the same ranks and the same measuring (`worker.py`).
"""
