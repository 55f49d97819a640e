"""Checkpoints: written by all ranks, found, checked, averaged."""
