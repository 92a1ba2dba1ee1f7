"""Trajectories and their files: integers and floats in numpy arrays, no torch."""

from prefixflow.trajectories.reader import (
    read_trajectories,
    routes_path,
    trajectory_files,
    write_trajectories,
)
from prefixflow.trajectories.types import (
    RouteShape,
    Trajectory,
    TrajectoryError,
    check_limits,
    check_routes,
    check_trajectories,
)

__all__ = [
    "RouteShape",
    "Trajectory",
    "TrajectoryError",
    "check_limits",
    "check_routes",
    "check_trajectories",
    "read_trajectories",
    "routes_path",
    "trajectory_files",
    "write_trajectories",
]
