"""Plan a step and its memory on every rank, and make sure that all ranks have the same plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from prefixflow.plan.context import ContextKV
from prefixflow.plan.plan import MergeGroups, Plan, PlanConfig, PrefixReuse
from prefixflow.runtime.failures import doing
from prefixflow.runtime.loss import LossConfig, has_zero_weight
from prefixflow.schedule.context import fit_with_context
from prefixflow.schedule.fit import AUTO, MemoryChoice
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.residency import GIB, ActivationPolicy, HostLink, MemoryPlan
from prefixflow.schedule.search import plan_pipeline, tables_digest
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What a run may do for its memory, and what it does.

    choice: how a plan is run. kv_budget_bytes: asked for, of K/V and gK/gV on one rank's device; `choice` may have another, chosen for a step. budget_bytes: of one rank's device, everything counted; then `fitted` chooses, among `policies` for
    dormant activations and, where context_kv is None, where K/V are under context parallelism. host: what decides between moving K/V and computing them again; None for that of the device.
    """

    model: MemoryModel
    choice: MemoryChoice = field(default_factory=MemoryChoice)
    kv_budget_bytes: int | None = None
    budget_bytes: int | None = None
    policies: tuple[ActivationPolicy, ...] = AUTO
    host: HostLink | None = None
    context_kv: ContextKV | None = None

    @classmethod
    def of(
        cls,
        model: MemoryModel,
        *,
        policy: str = "auto",
        kv_budget_gib: float | None = None,
        budget_gib: float | None = None,
        context_kv: ContextKV | None = None,
    ) -> MemorySettings:
        """policy: an `ActivationPolicy` by its value, or 'auto'."""
        # Without a budget for everything there is nothing to fit: keeping costs no time.
        unfitted = ActivationPolicy("keep" if policy == "auto" else policy)
        kv_budget_bytes = _bytes(kv_budget_gib)
        return cls(
            model=model,
            choice=MemoryChoice(unfitted, kv_budget_bytes=kv_budget_bytes),
            kv_budget_bytes=kv_budget_bytes,
            budget_bytes=_bytes(budget_gib),
            policies=AUTO if policy == "auto" else (unfitted,),
            context_kv=context_kv,
        )

    def plan_row(self, plan: Plan, data_rank: int, pipeline_rank: int, *, training: bool) -> MemoryPlan:
        """Of one pipeline rank; ValueError where an operation alone exceeds the cache's budget, on every rank alike."""
        return self.choice.memory_plan(plan, data_rank, pipeline_rank, self.model, self.host, training=training)

    def fitted(
        self,
        trajectories: Sequence[Trajectory],
        config: PlanConfig,
        omit: Collection[int] = (),
        *,
        placement: Sequence[int] | None = None,
        joint: Sequence[int] | None = None,
    ) -> tuple[Plan, MemorySettings]:
        """The plan of a step (arguments as `build_plan`) and how it is run; ValueError where nothing fits the budget."""
        if self.budget_bytes is None:
            return plan_pipeline(trajectories, config, omit=omit, placement=placement, joint=joint), self
        fit, context = fit_with_context(
            trajectories,
            config,
            self.model,
            self.budget_bytes,
            self.context_kv,
            policies=self.policies,
            kv_budget_bytes=self.kv_budget_bytes,
            omit=omit,
            placement=placement,
            joint=joint,
            host=self.host,
        )
        return fit.plan, replace(self, choice=fit.choice, model=replace(self.model, context_kv=context.kv))


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def dense_config(config: PlanConfig, trajectories: Sequence[Trajectory]) -> PlanConfig:
    """The same without reuse, under a token budget that holds the longest trajectory."""
    multiple = config.token_multiple
    longest = -(-max(len(t) - 1 for t in trajectories) // multiple) * multiple
    return replace(
        config,
        prefix_reuse=PrefixReuse.OFF,
        merge_groups=MergeGroups.OFF,
        max_tokens_per_microbatch=max(config.max_tokens_per_microbatch, longest),
    )


def dense_memory(settings: MemorySettings) -> MemorySettings:
    """The same without a budget of the K/V cache: nothing is cached from one microbatch for another."""
    return replace(settings, kv_budget_bytes=None, choice=replace(settings.choice, kv_budget_bytes=None))


def fit_step(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    loss: LossConfig,
    memory: MemorySettings,
    *,
    skip_zero_advantage: bool = False,
) -> tuple[Plan, MemorySettings]:
    """`plan_step` within the memory budget of `memory`, with what was chosen to stay within it; all ranks choose the same."""
    omit = zero_weight(trajectories, loss) if skip_zero_advantage else frozenset()
    plan, fitted = memory.fitted(trajectories, config, omit)
    _agree_on(plan, f" {fitted.choice} {fitted.model.context_kv}")
    return plan, fitted


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
    _agree_on(plan)
    return plan


def plan_calls(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    memory: MemorySettings | None,
    *,
    placement: Sequence[int],
    joint: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Plan, MemorySettings | None]:
    """The plan of a step of placed trajectories with loss calls (`build_plan`), and how it is run; compared with those of the
    other ranks of `group`, which are all that build it. None for `memory` keeps everything on the device."""
    if memory is None:
        plan, fitted = plan_pipeline(trajectories, config, placement=placement, joint=joint), None
    else:
        plan, fitted = memory.fitted(trajectories, config, placement=placement, joint=joint)
    _agree_on(plan, "" if fitted is None else f" {fitted.choice} {fitted.model.context_kv}", group)
    return plan, fitted


def _agree_on(plan: Plan, further: str = "", group: dist.ProcessGroup | None = None) -> None:
    tables = "" if plan.config.expert_block == 1 else f" {tables_digest(plan)}"
    agree(f"{plan.digest}{tables}{further}", group)


def zero_weight(trajectories: Sequence[Trajectory], loss: LossConfig) -> frozenset[int]:
    """Trajectories whose rows may leave the backward problem (`--skip-zero-advantage`)."""
    return frozenset(
        i for i, t in enumerate(trajectories) if has_zero_weight(loss, torch.from_numpy(t.advantages[t.loss_mask]))
    )


def agree(digest: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of `group` (None: of the world) when they have different plans: an error now instead of a hang later."""
    digests: list[str] = [""] * dist.get_world_size(group)
    with doing("agreeing on the plan"):
        dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"The ranks built different plans (digests by rank: {digests}); they must read the same "
            "trajectories with the same arguments."
        )
