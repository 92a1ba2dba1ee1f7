"""Choose where K/V are under context parallelism: whole on each rank where that fits, else sharded (`plan.ring`).

Gathered K/V move once, whatever reads them; sharded ones move again for each microbatch that reads them, and need 1 / cp of
the memory. The choice depends on the plan and the memory model alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from prefixflow.plan.context import ContextKV
from prefixflow.plan.plan import PlanConfig
from prefixflow.schedule.fit import AUTO, Fit, fit_plan, least_kept_bytes
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.residency import GIB, ActivationPolicy, HostLink
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class ContextKVChoice:
    """The choice, and the reason in a few words for people."""

    kv: ContextKV
    reason: str


def unfitted_choice(wanted: ContextKV | None) -> ContextKVChoice:
    """Without a memory budget: what is asked for, else `GATHER`."""
    if wanted is not None:
        return ContextKVChoice(wanted, "asked for")
    return ContextKVChoice(ContextKV.GATHER, "moves least, and there is no memory budget")


def fit_with_context(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    memory: MemoryModel,
    budget_bytes: int,
    wanted: ContextKV | None,
    *,
    policies: Sequence[ActivationPolicy] = AUTO,
    kv_budget_bytes: int | None = None,
    omit: Collection[int] = (),
    placement: Sequence[int] | None = None,
    joint: Sequence[int] | None = None,
    host: HostLink | None = None,
) -> tuple[Fit, ContextKVChoice]:
    """`fit_plan` with K/V where `wanted` says. None takes `GATHER` where a step fits that keeps everything on the device, else
    `RING`, and `GATHER` with what leaves the device only where that does not fit either. Errors as `fit_plan`."""

    def fit(kv: ContextKV, allowed: Sequence[ActivationPolicy]) -> Fit:
        return fit_plan(
            trajectories,
            config,
            replace(memory, context_kv=kv),
            budget_bytes,
            policies=allowed,
            kv_budget_bytes=kv_budget_bytes,
            omit=omit,
            placement=placement,
            joint=joint,
            host=host,
        )

    if wanted is not None or memory.context_parallel == 1:
        choice = unfitted_choice(wanted)
        return fit(choice.kv, policies), choice
    budget = f"the budget of {budget_bytes / GIB:.4g} GiB"
    gathered = replace(memory, context_kv=ContextKV.GATHER)
    # Long prefixes make small microbatches dear to plan: what cannot fit under any token budget is not tried.
    if kv_budget_bytes is not None or least_kept_bytes(trajectories, config, gathered, omit) <= budget_bytes:
        try:
            return fit(ContextKV.GATHER, (ActivationPolicy.KEEP,)), ContextKVChoice(
                ContextKV.GATHER, f"moves least, and fits {budget}"
            )
        except ValueError:
            pass
    try:
        return fit(ContextKV.RING, policies), ContextKVChoice(
            ContextKV.RING, f"gathered K/V, all kept on the device, exceed {budget}"
        )
    except ValueError:
        # The refusal that the caller gets is of the last way tried.
        return fit(ContextKV.GATHER, policies), ContextKVChoice(
            ContextKV.GATHER, f"sharded K/V do not fit {budget} either, and these can leave the device"
        )
