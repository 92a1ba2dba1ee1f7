"""Trajectories -> forest of shared segments (pure: integers in, integers out)."""

from prefixflow.forest.build import build_forest, may_share, merged_labels
from prefixflow.forest.forest import Forest, Segment
from prefixflow.forest.routes import RouteMismatch, RouteReport, resolve_routes

__all__ = [
    "Forest",
    "RouteMismatch",
    "RouteReport",
    "Segment",
    "build_forest",
    "may_share",
    "merged_labels",
    "resolve_routes",
]
