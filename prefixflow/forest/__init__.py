"""Trajectories -> forest of shared segments (pure: integers in, integers out)."""

from prefixflow.forest.build import build_forest, may_share, merged_labels
from prefixflow.forest.forest import Forest, Segment

__all__ = ["Forest", "Segment", "build_forest", "may_share", "merged_labels"]
