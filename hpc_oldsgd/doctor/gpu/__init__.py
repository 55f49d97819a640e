"""`doctor --gpu`: are kernel, streams, staging and a CUDA-aware MPI right here, and how fast?

Every module measures one thing on its own rank and returns plain values. `verdicts` says from
those of all ranks what they mean.
"""
