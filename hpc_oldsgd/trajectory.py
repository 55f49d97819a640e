"""A researcher's own problem in simulated time: `hpc_oldsgd.trajectory.trajectory`."""

from .simulation.trajectory import Trajectory, trajectory

__all__ = ["Trajectory", "trajectory"]
