"""Plan a step and its memory on every rank, and make sure that all ranks have the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.runtime.failures import doing
from prefixflow.runtime.loss import LossConfig, has_zero_weight
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.residency import ActivationPolicy, HostLink, MemoryPlan, plan_memory
from prefixflow.schedule.search import plan_pipeline, tables_digest
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What a run may do for its memory.

    prefix_memory: of dormant microbatches. kv_budget_bytes: of K/V and gK/gV on one rank's device; None for no limit.
    host: what decides between moving K/V and computing them again; None for the default.
    """

    model: MemoryModel
    prefix_memory: ActivationPolicy = ActivationPolicy.KEEP
    kv_budget_bytes: int | None = None
    host: HostLink | None = None

    def plan_row(self, plan: Plan, data_rank: int, pipeline_rank: int, *, training: bool) -> MemoryPlan:
        """Of one pipeline rank; ValueError where an operation alone exceeds the budget, on every rank alike."""
        if self.prefix_memory is ActivationPolicy.KEEP and self.kv_budget_bytes is None:
            return MemoryPlan()
        return plan_memory(
            plan,
            data_rank,
            pipeline_rank,
            self.model,
            prefix_memory=self.prefix_memory,
            kv_budget_bytes=self.kv_budget_bytes,
            host=self.host,
            training=training,
        )


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
