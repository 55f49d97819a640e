"""Seconds to a target on slow networks: python -m benchmarks.accuracy (root).

All contestants train the same model from the same start on the same batches. While the clock runs
a rank only trains, and copies its model aside now and then. Every few seconds the clock stands
still on all ranks: the copies are averaged over the ranks and measured on the test set, and who has
reached the target is done.

A cell is one contestant on one link in one repeat. Its result is written when it ends, and a
command that is started again goes on with the next one.
"""
