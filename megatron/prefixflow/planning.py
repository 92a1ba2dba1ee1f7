"""Plan a step on every rank and make sure that all ranks have the same plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.runtime.failures import doing
from prefixflow.runtime.loss import LossConfig, has_zero_weight
from prefixflow.schedule.search import plan_pipeline, tables_digest
from prefixflow.trajectories.types import Trajectory


def plan_step(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    loss: LossConfig,
    *,
    skip_zero_advantage: bool = False,
) -> Plan:
    """Build this rank's plan and compare it with the others' before any other collective."""
    omit = zero_weight(trajectories, loss) if skip_zero_advantage else frozenset()
    plan = plan_pipeline(trajectories, config, omit=omit)
    agree(plan.digest if config.expert_block == 1 else f"{plan.digest} {tables_digest(plan)}")
    return plan


def zero_weight(trajectories: Sequence[Trajectory], loss: LossConfig) -> frozenset[int]:
    """Trajectories whose rows may leave the backward problem (`--skip-zero-advantage`)."""
    return frozenset(
        i for i, t in enumerate(trajectories) if has_zero_weight(loss, torch.from_numpy(t.advantages[t.loss_mask]))
    )


def agree(digest: str) -> None:
    """Raise on every rank when the ranks have different plans: an error now instead of a hang later."""
    digests: list[str] = [""] * dist.get_world_size()
    with doing("agreeing on the plan"):
        dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"The ranks built different plans (digests by rank: {digests}); they must read the same "
            "trajectories with the same arguments."
        )
