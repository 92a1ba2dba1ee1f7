"""One step of one data-parallel rank: run the plan's table on the model, forward-backward or forward only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.prefixflow.context import kv_traffic, ring_traffic
from megatron.prefixflow.device import torch_device
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.overlap import EarlyReduction
from megatron.prefixflow.planning import MemorySettings, fit_step, plan_calls, plan_step
from megatron.prefixflow.router import has_router_terms
from megatron.prefixflow.routing import (
    RouterTotals,
    RouteStore,
    RoutingReplay,
    StageRouting,
    route_shape,
    router_totals,
)
from megatron.prefixflow.stage import StageRunner, Workload
from prefixflow.forest import Forest
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.context import ContextKV
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.plan.ring import rowless
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.attention.ring import RingStep
from prefixflow.runtime.cache import CacheTotals, DeviceBytes, KVCache
from prefixflow.runtime.context import ContextParallel
from prefixflow.runtime.executor import Observer, execute
from prefixflow.runtime.host import HostArena
from prefixflow.runtime.links import Links, Topology
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.objective import Objective, RowObjective, logical_normalizer
from prefixflow.runtime.trace import together
from prefixflow.schedule.ops import Op
from prefixflow.schedule.residency import ActivationPolicy, MemoryPlan, Move
from prefixflow.schedule.search import rank_table
from prefixflow.trajectories.types import Trajectory, check_routes, check_trajectories


def rank_trajectories(plan: Plan, data_rank: int) -> tuple[int, ...]:
    """Indices of the trajectories that data-parallel rank runs, ascending (those without positions left out)."""
    trees = set(plan.trees[data_rank])
    members = {m for s in plan.forest.segments if s.tree in trees for m in s.members}
    return tuple(sorted(members))


class StepRunner:
    """Runs plans on a model.

    chunks: the bare `GPTModel`s of this rank, one per virtual pipeline stage; gradients go to `main_grad` where
        DDP made one.
    reduction (attribute): starts to reduce gradients during the last backwards; None reduces after the step.
    max_response_tokens: constant divisor of seq-mean-token-sum-norm; None takes the longest response of the step.
    memory: budget of the K/V cache and policy of dormant activations; None keeps everything on the device.
    arena (attribute): host memory of this rank. caches (attribute): K/V of each chunk.
    routing_replay: whose routes a model with experts takes. A pass that is given a `RouteStore` fills it, or takes the
        routes that an earlier pass over the same plan left there; OFF leaves it alone.
    router_totals (attribute): of the last pass, on this rank.
    context_bytes, context_bytes_planned (attributes): of K/V and their gradients that this rank has received from its
        context-parallel peers in the last pass, and what the plan says it should.
    peak_shards (attribute): of K/V that this rank has held for the ring in the last pass, beside those at rest.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        groups: Groups,
        kernel: AttentionKernel,
        *,
        vocab_size: int,
        max_response_tokens: int | None = None,
        routing_replay: RoutingReplay = RoutingReplay.OFF,
        memory: MemorySettings | None = None,
    ) -> None:
        self.chunks = tuple(chunks)
        self.memory = memory
        self.groups = groups
        self.kernel = kernel
        self.vocab_size = vocab_size
        self.max_response_tokens = max_response_tokens
        self.routing_replay = routing_replay
        self.router_totals = RouterTotals()
        parameter = next(self.chunks[0].parameters())
        self.parameter_dtype = parameter.dtype
        self.dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self._begin_empty()
        self.parallel = ContextParallel(groups.context) if groups.context.size() > 1 else None
        self.num_computed_tokens = 0
        self.num_recomputed = 0
        self.num_bytes_sent = 0
        self.context_bytes = self.context_bytes_planned = self.peak_shards = 0
        self.observe: Observer | None = None
        self.reduction: EarlyReduction | None = None

    @property
    def device(self) -> torch.device:
        """Of the weights, which a framework may keep on the host between steps."""
        return next(self.chunks[0].parameters()).device

    @property
    def has_head(self) -> bool:
        """True on the last pipeline rank, which scores: elsewhere a `RowObjective` stays empty."""
        return bool(self.chunks[-1].post_process)

    @property
    def context_kv(self) -> ContextKV:
        """Where K/V are under context parallelism, the same on all ranks."""
        return ContextKV.GATHER if self.memory is None else self.memory.model.context_kv

    @property
    def cache_totals(self) -> CacheTotals:
        """Of the last pass, on this rank."""
        return CacheTotals.of(self.caches, self._kv_bytes)

    def plan(
        self,
        trajectories: Sequence[Trajectory],
        config: PlanConfig,
        loss: LossConfig,
        *,
        skip_zero_advantage: bool = False,
    ) -> Plan:
        """Plan a step, the same on all ranks. Under a memory budget passes are run from here on as was chosen for it."""
        if self.memory is None or self.memory.budget_bytes is None:
            return plan_step(trajectories, config, loss, skip_zero_advantage=skip_zero_advantage)
        plan, self.memory = fit_step(trajectories, config, loss, self.memory, skip_zero_advantage=skip_zero_advantage)
        return plan

    def plan_calls(
        self,
        trajectories: Sequence[Trajectory],
        config: PlanConfig,
        *,
        placement: Sequence[int],
        joint: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Plan:
        """Plan a step of placed trajectories under a loss that is called (`CalledObjective`), the same on the ranks of `group`
        (`groups.planning_group`). Under a memory budget passes are run from here on as was chosen for it. ValueError for tokens
        beyond the vocabulary."""
        check_trajectories(trajectories, vocab_size=self.vocab_size)
        plan, self.memory = plan_calls(trajectories, config, self.memory, placement=placement, joint=joint, group=group)
        return plan

    def forward_backward(
        self,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        loss: LossConfig,
        *,
        with_entropy: bool = False,
        routes: RouteStore | None = None,
    ) -> Objective:
        """Gradients of this rank's trajectories, normalised by the counts of the whole batch; not yet reduced."""
        chosen = rank_trajectories(plan, self.groups.data_rank)
        normalizer = logical_normalizer(trajectories, chosen, self.device, self.max_response_tokens)
        objective = self._objective(trajectories, chosen, loss, normalizer, with_entropy)
        for chunk in self.chunks:
            chunk.train()
        self.run(plan, trajectories, objective, training=True, routes=routes)
        return objective

    def score(
        self,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        *,
        with_entropy: bool = False,
        routes: RouteStore | None = None,
    ) -> Objective:
        """Log-probabilities of this rank's trajectories by the same plan, forward only, without graphs."""
        chosen = rank_trajectories(plan, self.groups.data_rank)
        objective = self._objective(trajectories, chosen, None, None, with_entropy)
        self.run(plan, trajectories, objective, training=False, routes=routes)
        return objective

    def _objective(
        self,
        trajectories: Sequence[Trajectory],
        chosen: Sequence[int],
        loss: LossConfig | None,
        normalizer: Any,
        with_entropy: bool,
    ) -> Objective:
        return Objective(
            trajectories,
            chosen,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            device=self.device,
            config=loss if self.has_head else None,
            normalizer=normalizer,
            with_entropy=with_entropy,
        )

    def run(
        self,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        objective: RowObjective,
        *,
        training: bool,
        routes: RouteStore | None = None,
    ) -> None:
        """Run this rank's part of `plan` under `objective`, of its trajectories: forward and backward, or forward only without
        graphs. Gradients are not yet reduced. It talks to the ranks of its model and those it exchanges tokens with, to no others.

        What a pass that fails has left in caches and host memory is let go, so that another one can be run; gradients stay as
        far as it came.
        """
        try:
            with nullcontext() if training else torch.no_grad():
                self._run(plan, trajectories, objective, training=training, store=routes)
                if self.has_head:
                    objective.finish()
        except BaseException:
            self._begin_empty()
            raise

    def _begin_empty(self) -> None:
        self.arena = HostArena()
        self._kv_bytes = DeviceBytes()
        prefetches = torch_device().type == "cuda"
        self.caches = tuple(KVCache(self.arena, self._kv_bytes, prefetches=prefetches) for _ in self.chunks)

    def _run(
        self,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        objective: RowObjective,
        *,
        training: bool,
        store: RouteStore | None,
    ) -> None:
        microbatches = plan.ranks[self.groups.data_rank]
        workload = Workload(plan.forest, microbatches, trajectories, self._routes(plan, trajectories))
        routing = self._routing(plan, training=training, store=store)
        ring = None
        if self.parallel is not None:
            self.parallel.num_bytes = 0
            if self.context_kv is ContextKV.RING:
                ring = RingStep(self.parallel, microbatches)
        position, num_ranks = self.groups.pipeline_rank, self.groups.pipeline.size()
        memory = self._memory_plan(plan, training=training)
        stages = {}
        self.arena.begin_step()
        self._kv_bytes.begin_step()
        for number, (chunk, cache) in enumerate(zip(self.chunks, self.caches, strict=True)):
            cache.begin_step()
            stages[number * num_ranks + position] = StageRunner(
                chunk,
                workload,
                objective,
                self.kernel,
                cache,
                training=training,
                tp_group=self.groups.tensor,
                routing=routing[number] if routing else None,
                parallel=self.parallel,
                ring=ring,
                stage=number * num_ranks + position,
                memory=memory,
                host=self.arena,
                sizes=None if self.memory is None else self.memory.model,
            )
        table = rank_table(plan, self.groups.data_rank, training=training)
        row = table.rows[position]
        links = self._links(row, microbatches) if num_ranks > 1 else None
        execute(table, position, stages, links, self._observer(row, training=training), memory)
        self.num_computed_tokens = stages[position].num_computed_tokens
        self.num_recomputed = sum(stage.num_recomputed for stage in stages.values())
        self.num_bytes_sent = links.num_bytes_sent if links is not None else 0
        self.router_totals = router_totals(routing)
        if self.parallel is not None:
            self.context_bytes = self.parallel.num_bytes
            self.context_bytes_planned = self._planned_context_bytes(plan, trajectories, memory, training=training)
        self.peak_shards = ring.held.peak if ring is not None else 0

    def _planned_context_bytes(
        self, plan: Plan, trajectories: Sequence[Trajectory], memory: MemoryPlan, *, training: bool
    ) -> int:
        microbatches = plan.ranks[self.groups.data_rank]
        rows = segment_row_counts(plan.forest, trajectories)
        if self.context_kv is ContextKV.RING:
            return self._ring_bytes(microbatches, rows, memory, training=training)
        size, reads_own = self.groups.context.size(), not memory
        num_bytes = kv_traffic(self.chunks, training=training).num_bytes(microbatches, size, reads_own=reads_own)
        for chunk, m, _ in self._run_again(memory):
            num_bytes += kv_traffic([chunk], training=False).num_bytes([microbatches[m]], size)
        return num_bytes

    def _ring_bytes(
        self, microbatches: Sequence[Microbatch], rows: Sequence[int], memory: MemoryPlan, *, training: bool
    ) -> int:
        without_rows = rowless(microbatches, rows)
        place = self.groups.context.size(), self.groups.context.rank(), without_rows
        num_bytes = ring_traffic(self.chunks, training=training).num_bytes(microbatches, *place)
        for chunk, m, writes_only in self._run_again(memory):
            traffic = ring_traffic([chunk], training=False, keys_only=writes_only)
            num_bytes += traffic.num_bytes(microbatches, *place, counted=[microbatches[m]])
        return num_bytes

    def _run_again(self, memory: MemoryPlan) -> Iterator[tuple[Any, int, bool]]:
        """(chunk, microbatch, whether only for the K/V that it writes) of each forward that a memory plan runs once more."""
        for action in itertools.chain(*memory.before.values(), *memory.after.values()):
            if action.move is Move.RECOMPUTE:
                yield self._chunk(action.stage), action.target, True
        for (stage, m), policy in memory.activations.items():
            if policy is ActivationPolicy.RECOMPUTE:
                yield self._chunk(stage), m, False

    def _chunk(self, stage: int) -> Any:
        return self.chunks[stage // self.groups.pipeline.size()]

    def _memory_plan(self, plan: Plan, *, training: bool) -> MemoryPlan:
        if self.memory is None:
            return MemoryPlan()
        return self.memory.plan_row(plan, self.groups.data_rank, self.groups.pipeline_rank, training=training)

    def _routes(self, plan: Plan, trajectories: Sequence[Trajectory]) -> Sequence[np.ndarray] | None:
        """What each trajectory's positions are routed to, in a replay of the rollout."""
        if self.routing_replay is not RoutingReplay.ROLLOUT or self.chunks[0].config.num_moe_experts is None:
            return None
        if plan.routes is None:
            raise ValueError(
                "Routing replay of the rollout needs a plan with routes, got one without: set route_mismatch in its PlanConfig."
            )
        shape = route_shape(self.chunks[0].config)
        for index in rank_trajectories(plan, self.groups.data_rank):
            check_routes(trajectories[index], shape)
        return plan.routes

    def _routing(self, plan: Plan, *, training: bool, store: RouteStore | None) -> list[StageRouting]:
        """One for each chunk; none in a model without experts."""
        config = self.chunks[0].config
        if config.num_moe_experts is None:
            return []
        if training and has_router_terms(config):
            self._refuse_omitted(plan.forest)
        keeps = store is not None and self.routing_replay is not RoutingReplay.OFF
        return [
            StageRouting(
                chunk,
                plan.forest,
                is_training=training,
                kept=store.chunk(number, plan.digest) if store is not None and keeps else None,
                tp_group=self.groups.tensor,
                parallel=self.parallel,
            )
            for number, chunk in enumerate(self.chunks)
        ]

    def _observer(self, row: Sequence[Op], *, training: bool) -> Observer | None:
        if self.reduction is None or not training:
            return self.observe
        reduction = self.reduction.during(row)
        return reduction if self.observe is None else together(self.observe, reduction)

    def _refuse_omitted(self, forest: Forest) -> None:
        """Every position has a part in a router's losses and counts."""
        left_out = [i for i in sorted(forest.omitted) if forest.lengths[i] > 0]
        if left_out:
            raise ValueError(
                f"The plan leaves out trajectories {left_out}, but the routers have losses or biases, to which every "
                "trajectory adds. Plan without omitting any (without --skip-zero-advantage)."
            )

    def _links(self, row: Sequence[Op], microbatches: Sequence[Microbatch]) -> Links:
        config = self.chunks[0].config
        divisor = self.groups.context.size() * (self.groups.tensor.size() if config.sequence_parallel else 1)
        ranks = self.groups.pipeline_ranks
        return Links(
            row,
            Topology(ranks, self.groups.pipeline_rank, len(ranks) * len(self.chunks)),
            self.groups.channels,
            shape=lambda m: (microbatches[m].num_physical_tokens // divisor, 1, config.hidden_size),
            dtype=self.parameter_dtype,
            device=self.device,
        )


def complete_logprobs(
    runner: StepRunner, plan: Plan, trajectories: Sequence[Trajectory], loss: LossConfig
) -> tuple[Trajectory, ...]:
    """Fill in the reference log-probabilities that a KL term needs and the file lacks, for this rank's trajectories.

    They are scored by the model as it is now. Missing `old_logprobs` need no pass: the policy at the start of the step is
    what its own forwards score (`Objective`).
    """
    chosen = rank_trajectories(plan, runner.groups.data_rank)
    missing = [i for i in chosen if trajectories[i].ref_logprobs is None]
    # The ranks of one model hold the same trajectories, so they agree; data-parallel ranks share no collective here.
    if not loss.needs_reference or not missing:
        return tuple(trajectories)
    scored = runner.score(plan, trajectories).trajectory_logprobs()
    if not runner.has_head:
        return tuple(trajectories)
    completed = list(trajectories)
    for i in missing:
        completed[i] = replace(completed[i], ref_logprobs=spread_logprobs(completed[i], scored[i]))
    return tuple(completed)


def spread_logprobs(trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
    """Per-token array [n] with `values` at the trained tokens and 0 elsewhere."""
    spread = np.zeros(len(trajectory.tokens))
    spread[trajectory.loss_mask] = values
    return spread
