"""The dense run of a step, which the first steps of a run are compared with (`--verify-steps`).

Steps: (1) the batch is planned once more, every trajectory whole; (2) that plan runs on the same ranks, its gradients are
reduced and copied to the host, and what it changed in the routers is put back; (3) the step runs as it always does; (4) its
log-probabilities, its loss and every gradient are compared with the dense run's (`problems_of`).

The step's own gradients are never touched, so a verified step trains exactly as an unverified one. Both runs have the same
reference log-probabilities, and the same old ones in a later update on a batch: those that the shared plan scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.prefixflow.step import rank_trajectories
from megatron.prefixflow.verify import TOLERANCE, TOLERANCE_MOE, GradientErrors, Named, Snapshot
from prefixflow.plan.plan import Plan
from prefixflow.runtime.objective import Objective
from prefixflow.trajectories.types import Trajectory

LOGPROB_FACTOR = 100
"""Limit of absolute log-probability errors over that of gradients: values of order 10."""
LOGPROB_TOLERANCE_BF16 = 0.5
"""Of a trajectory's mean: logits of order 10 to 30 are rounded to 0.06 to 0.25 (docs/numerics.md)."""


def with_peers_logprobs(
    plan: Plan, trajectories: Sequence[Trajectory], group: dist.ProcessGroup
) -> tuple[Trajectory, ...]:
    """Trajectories with what their ranks under `plan` know of them, since another plan may run them elsewhere; collective.

    group: data-parallel ranks.
    """
    if group.size() == 1:
        return tuple(trajectories)
    mine = rank_trajectories(plan, group.rank())
    known = {i: (trajectories[i].old_logprobs, trajectories[i].ref_logprobs) for i in mine}
    everyone: list[dict[int, tuple[np.ndarray | None, np.ndarray | None]]] = [{}] * group.size()
    dist.all_gather_object(everyone, known, group=group)
    complete = list(trajectories)
    for i, (old, ref) in (item for part in everyone for item in part.items()):
        complete[i] = replace(complete[i], old_logprobs=old, ref_logprobs=ref)
    return tuple(complete)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training pass gave in the whole world, the same on every rank.

    logprobs: of the trained tokens of each trajectory that was run, by its index. norm: of the reduced gradient.
    """

    logprobs: Mapping[int, np.ndarray]
    loss: float
    norm: float

    @classmethod
    def of(cls, objective: Objective, norm: float, *, is_counted: bool) -> Outcome:
        """Collective. is_counted: on the one rank of each model that speaks for it."""
        loss = 0.0 if objective.terms is None else float(objective.terms.loss)
        mine = (objective.trajectory_logprobs(), loss) if is_counted else ({}, 0.0)
        everyone: list[tuple[dict[int, np.ndarray], float]] = [({}, 0.0)] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        logprobs = {i: values for part, _ in everyone for i, values in part.items()}
        return cls(logprobs, sum(loss for _, loss in everyone), norm)


@dataclass(frozen=True, slots=True)
class DenseRun:
    """gradients: reduced, on the host. routers: counts and biases as they were before the run."""

    outcome: Outcome
    gradients: Named
    routers: Snapshot


def problems_of(
    outcome: Outcome,
    dense: Outcome,
    errors: GradientErrors,
    trajectories: Sequence[Trajectory],
    dtype: torch.dtype,
    *,
    has_experts: bool,
) -> tuple[str, ...]:
    """Where a step differs from its dense run by more than rounding in `dtype`, each a part of a sentence."""
    tolerance = (TOLERANCE_MOE if has_experts else TOLERANCE).get(dtype)
    if tolerance is None:
        limit, distances = LOGPROB_TOLERANCE_BF16, _distances(outcome, dense, np.mean)
    else:
        limit, distances = LOGPROB_FACTOR * tolerance, _distances(outcome, dense, np.max)
    found = [
        _logprob_problem(distances, trajectories, limit),
        _loss_problem(outcome, dense, limit),
        errors.problem(dtype, has_experts=has_experts),
    ]
    return tuple(problem for problem in found if problem is not None)


def _distances(outcome: Outcome, dense: Outcome, of: Callable[[np.ndarray], np.floating[Any]]) -> dict[int, float]:
    """Of the log-probabilities of each trajectory; inf where they are not numbers."""
    assert outcome.logprobs.keys() == dense.logprobs.keys(), "the two plans run different trajectories"
    errors = {i: np.abs(values - dense.logprobs[i]) for i, values in outcome.logprobs.items()}
    return {i: float(of(error)) if np.isfinite(error).all() else math.inf for i, error in errors.items() if len(error)}


def _logprob_problem(distances: Mapping[int, float], trajectories: Sequence[Trajectory], limit: float) -> str | None:
    worst = max(distances, key=distances.__getitem__, default=None)
    if worst is None or distances[worst] <= limit:
        return None
    return (
        f"log-probabilities of trajectory {trajectories[worst].id!r} differ by {distances[worst]:.3g}, limit {limit:g}"
    )


def _loss_problem(outcome: Outcome, dense: Outcome, limit: float) -> str | None:
    """A loss may cancel to nothing, so the gradient's norm gives the scale where it is larger."""
    difference, scale = abs(outcome.loss - dense.loss), max(abs(dense.loss), dense.norm)
    return None if difference <= limit * scale else f"the loss is {outcome.loss:.6g} and not {dense.loss:.6g}"
