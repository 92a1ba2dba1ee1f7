"""One step of one data-parallel rank: run the plan's table on the model, forward-backward or forward only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron.prefixflow.groups import Groups
from megatron.prefixflow.stage import Observer, StageRunner, Workload
from prefixflow.plan.plan import Plan
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.objective import Objective, logical_normalizer
from prefixflow.schedule.table import OpTable, build_forward_table, build_table
from prefixflow.trajectories.types import Trajectory


def rank_trajectories(plan: Plan, data_rank: int) -> tuple[int, ...]:
    """Indices of the trajectories that data-parallel rank runs, ascending (those without positions left out)."""
    trees = set(plan.trees[data_rank])
    members = {m for s in plan.forest.segments if s.tree in trees for m in s.members}
    return tuple(sorted(members))


def training_table(plan: Plan, data_rank: int) -> OpTable:
    return build_table([m.reads for m in plan.ranks[data_rank]])


class StepRunner:
    """Runs plans on a model. `model` is the bare `GPTModel`; gradients go to `main_grad` where DDP made one."""

    def __init__(
        self,
        model: Any,
        groups: Groups,
        kernel: AttentionKernel,
        *,
        vocab_size: int,
        max_response_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.groups = groups
        self.kernel = kernel
        self.vocab_size = vocab_size
        self.max_response_tokens = max_response_tokens
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self.cache = KVCache()
        self.num_computed_tokens = 0
        self.observe: Observer | None = None

    def forward_backward(
        self,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        loss: LossConfig,
        *,
        with_entropy: bool = False,
    ) -> Objective:
        """Gradients of this rank's trajectories, normalised by the counts of the whole batch; not yet reduced."""
        chosen = rank_trajectories(plan, self.groups.data_rank)
        normalizer = logical_normalizer(trajectories, chosen, self.device, self.max_response_tokens)
        objective = self._objective(trajectories, chosen, loss, normalizer, with_entropy)
        self.model.train()
        self._run(plan, trajectories, objective, training_table(plan, self.groups.data_rank))
        return objective

    @torch.no_grad()
    def score(self, plan: Plan, trajectories: Sequence[Trajectory], *, with_entropy: bool = False) -> Objective:
        """Log-probabilities of this rank's trajectories by the same plan, forward only, without graphs."""
        chosen = rank_trajectories(plan, self.groups.data_rank)
        objective = self._objective(trajectories, chosen, None, None, with_entropy)
        table = build_forward_table([m.reads for m in plan.ranks[self.groups.data_rank]])
        self._run(plan, trajectories, objective, table, training=False)
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
            config=loss,
            normalizer=normalizer,
            with_entropy=with_entropy,
        )

    def _run(
        self,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        objective: Objective,
        table: OpTable,
        *,
        training: bool = True,
    ) -> None:
        stage = StageRunner(
            self.model,
            Workload(plan.forest, plan.ranks[self.groups.data_rank], trajectories),
            objective,
            self.kernel,
            self.cache,
            training=training,
            tp_group=self.groups.tensor,
        )
        self.cache.begin_step()
        stage.run(table.rows[0], self.observe)
        self.num_computed_tokens = stage.num_computed_tokens


def complete_logprobs(
    runner: StepRunner, plan: Plan, trajectories: Sequence[Trajectory], loss: LossConfig
) -> tuple[Trajectory, ...]:
    """Fill in the reference log-probabilities that a KL term needs and the file lacks, for this rank's trajectories.

    They are scored by the model as it is now. Missing `old_logprobs` need no pass: the policy at the start of the step is
    what its own forwards score (`Objective`).
    """
    chosen = rank_trajectories(plan, runner.groups.data_rank)
    missing = [i for i in chosen if trajectories[i].ref_logprobs is None]
    # Tensor-parallel peers hold the same trajectories, so they agree; data-parallel ranks share no collective here.
    if not loss.needs_reference or not missing:
        return tuple(trajectories)
    scored = runner.score(plan, trajectories).trajectory_logprobs()
    completed = list(trajectories)
    for i in missing:
        completed[i] = replace(completed[i], ref_logprobs=spread_logprobs(completed[i], scored[i]))
    return tuple(completed)


def spread_logprobs(trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
    """Per-token array [n] with `values` at the trained tokens and 0 elsewhere."""
    spread = np.zeros(len(trajectory.tokens))
    spread[trajectory.loss_mask] = values
    return spread
