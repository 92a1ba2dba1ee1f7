"""PrefixFlow: RL post-training on Megatron-Core that computes each shared prefix once.

`prefixflow.build_plan(trajectories, PlanConfig(...))` is pure: it runs without torch, a GPU or a process group.
"""

from prefixflow.plan.plan import Plan, PlanConfig, PrefixReuse, build_plan
from prefixflow.trajectories import Trajectory, TrajectoryError, read_trajectories

__all__ = [
    "Plan",
    "PlanConfig",
    "PrefixReuse",
    "Trajectory",
    "TrajectoryError",
    "build_plan",
    "read_trajectories",
]
