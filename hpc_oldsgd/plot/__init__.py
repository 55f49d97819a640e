"""Figures of runs. Reads run folders only: no training code, no torch."""
