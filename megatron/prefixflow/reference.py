"""The independent reference: every trajectory whole, unpadded, alone, through an untouched Megatron-Core model.

Nothing of ours computes here: Megatron's own layer spec, core attention, rotary embedding and norms on one process, torch's
`log_softmax`, losses written out again per trajectory from docs/numerics.md, and torch's optimizers. Experts, their
routers' auxiliary losses, biases and counts are Megatron's too: with one trajectory a microbatch its losses are those of a
trajectory. It is slow and simple on purpose; parity compares the shipped path with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias, reset_model_temporary_tensors
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from prefixflow.runtime.loss import LossConfig
from prefixflow.trajectories.types import Trajectory


@dataclass(slots=True)
class ReferenceStep:
    """Results of one step: gradients (of the normalised loss, before clipping) and per-trajectory log-probabilities.

    expert_counts: int64 [experts] by router, positions of all trajectories that it sent to each expert, where biases are on.
    router_losses: value by Megatron's name, without coefficient, mean over trajectories, summed over layers.
    routes: of each trajectory, [positions, moe layers, top-k], as they were taken.
    """

    loss: float
    grads: dict[str, Tensor]
    logprobs: list[Tensor]
    norm: float
    expert_counts: dict[str, Tensor] = field(default_factory=dict)
    router_losses: dict[str, float] = field(default_factory=dict)
    routes: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The optimizer of both sides: SGD with momentum, or Adam (without weight decay), and a gradient-norm limit."""

    optimizer: str
    lr: float
    momentum: float
    adam_betas: tuple[float, float]
    adam_eps: float
    max_norm: float


def build_reference_model(config: Any, **gpt_kwargs: Any) -> GPTModel:
    """An untouched GPTModel from Megatron's local layer spec, on this process alone."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return GPTModel(config=config, transformer_layer_spec=spec, **gpt_kwargs)


class GivenRoutes:
    """Stands on Megatron's hook for replay, `TopKRouter.router_replay`: rows that are given, the others as Megatron would.

    given [positions, top-k], a row with a -1 is unknown; None gives nothing. taken: of the last forward.
    """

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.taken: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, native: Any
    ) -> tuple[Tensor, Tensor]:
        values, experts = native(scores, topk, num_groups, group_topk)
        if self.given is not None:
            is_known = (self.given >= 0).all(1, keepdim=True)
            experts = torch.where(is_known, self.given, experts)
            values = scores.gather(1, experts)
        self.taken = experts
        return values, experts


class Reference:
    """Steps of the dense trainer, one trajectory at a time.

    Trajectories that bring routes are routed to them: give each the rows that it is to be run with (`effective_routes`).
    """

    def __init__(self, model: GPTModel, loss: LossConfig, max_tokens: int | None = None) -> None:
        self.model = model.train()
        self.loss = loss
        self.max_tokens = max_tokens
        self.accumulator = torch.float64 if _dtype(model) == torch.float64 else torch.float32
        self._masters = [torch.nn.Parameter(p.detach().to(self.accumulator, copy=True)) for p in model.parameters()]
        self._optimizer: torch.optim.Optimizer | None = None
        self._reference_logprobs: list[Tensor] | None = None
        self._routers = {n: m for n, m in model.named_modules() if isinstance(m, TopKRouter)}
        for router in self._routers.values():
            router.router_replay = GivenRoutes()
        self._biased_routers = {n: r for n, r in self._routers.items() if r.enable_expert_bias}

    def step(self, trajectories: Sequence[Trajectory]) -> ReferenceStep:
        """Loss, gradients and log-probabilities of the whole batch (no update)."""
        if self.loss.kl_coef and self._reference_logprobs is None:
            with torch.no_grad():
                self._reference_logprobs = [self._score(t)[0] for t in trajectories]
        sums = {name: torch.zeros_like(p, dtype=self.accumulator) for name, p in self.model.named_parameters()}
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / len(trajectories)))
        # Not its own function for this: its sums have as many layers as the first model of the process.
        get_moe_layer_wise_logging_tracker().clear()
        total, logprobs, routes = 0.0, [], []
        for index, trajectory in enumerate(trajectories):
            self.model.zero_grad(set_to_none=True)
            scored, entropy = self._score(trajectory)
            logprobs.append(scored.detach())
            routes.append(self._routes_taken(trajectory))
            contribution = self._contribution(index, trajectory, scored, entropy, trajectories)
            if contribution is None:
                if not self._routers or not scored.requires_grad:
                    continue
                # Nothing is trained, but routers have losses of their own: an empty sum reaches them.
                contribution = scored.sum()
            contribution.backward()
            total += float(contribution.detach())
            for name, p in self.model.named_parameters():
                if p.grad is not None:
                    sums[name] += p.grad
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in sums.values()))
        return ReferenceStep(
            total, sums, logprobs, norm, self._expert_counts(), _router_losses(len(trajectories)), routes
        )

    def update(self, step: ReferenceStep, settings: UpdateSettings) -> None:
        """Clip by global norm, then one step of torch's own optimizer on master weights."""
        if self._optimizer is None:
            self._optimizer = _torch_optimizer(self._masters, settings)
        limit = settings.max_norm
        scale = limit / step.norm if 0 < limit < step.norm else 1.0
        for master, grad in zip(self._masters, step.grads.values(), strict=True):
            master.grad = grad * scale
        self._optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self._masters, strict=True):
                p.copy_(master)
        if self._biased_routers:
            _update_router_expert_bias([self.model], self.model.config)
            reset_model_temporary_tensors(self.model.config, [self.model])

    def _give_routes(self, trajectory: Trajectory) -> None:
        for layer, router in enumerate(self._routers.values()):
            rows = None if trajectory.routes is None else torch.from_numpy(trajectory.routes[:, layer].astype(np.int64))
            router.router_replay.given = None if rows is None else rows.to(router.weight.device)

    def _routes_taken(self, trajectory: Trajectory) -> np.ndarray:
        if len(trajectory) < 2 or not self._routers:
            return np.zeros((0, 0, 0), np.int64)
        return torch.stack([r.router_replay.taken for r in self._routers.values()], 1).cpu().numpy()

    def _expert_counts(self) -> dict[str, Tensor]:
        return {name: router.local_tokens_per_expert.long().clone() for name, router in self._biased_routers.items()}

    def _score(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the trained tokens [n]."""
        device = next(self.model.parameters()).device
        tokens = torch.from_numpy(trajectory.tokens).to(device)
        if len(tokens) < 2:
            empty = torch.zeros(0, dtype=self.accumulator, device=device)
            return empty, empty
        length = len(tokens) - 1
        self._give_routes(trajectory)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        logits = self.model(
            input_ids=tokens[None, :-1],
            position_ids=torch.arange(length, device=device)[None],
            attention_mask=mask,
        )[0]
        logits = logits.to(self.accumulator) / trajectory.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        trained = torch.from_numpy(trajectory.loss_mask[1:].copy()).to(device)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        picked = logprobs.gather(1, tokens[1:, None])[:, 0]
        return picked[trained], entropy[trained]

    def _contribution(
        self,
        index: int,
        trajectory: Trajectory,
        logprobs: Tensor,
        entropy: Tensor,
        batch: Sequence[Trajectory],
    ) -> Tensor | None:
        """This trajectory's part of the loss, normalised by the counts of the whole batch; None without a token."""
        if not len(logprobs):
            return None
        given = {
            name: self._given(trajectory, name)
            for name in ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
        }
        old = logprobs.detach() if given["old_logprobs"] is None else given["old_logprobs"]
        losses = self._policy(logprobs, old, given["advantages"])
        if self.loss.tis_cap is not None:
            rollout = given["rollout_logprobs"]
            assert rollout is not None
            weight = (old - rollout).exp().clamp(max=self.loss.tis_cap)
            losses = losses * weight
        if self.loss.kl_coef:
            ref = given["ref_logprobs"]
            if ref is None:
                assert self._reference_logprobs is not None
                ref = self._reference_logprobs[index]
            losses = losses + self.loss.kl_coef * self._kl(logprobs - ref)
        losses = losses - self.loss.entropy_coef * entropy
        counts = [int(t.loss_mask.sum()) for t in batch]
        aggregation = self.loss.aggregation.value
        if aggregation == "token-mean":
            return losses.sum() / sum(counts)
        if aggregation == "seq-mean-token-mean":
            return losses.mean() / len(batch)
        if aggregation == "seq-mean-token-sum":
            return losses.sum() / len(batch)
        return losses.sum() / (len(batch) * (self.max_tokens or max(counts)))

    def _given(self, trajectory: Trajectory, name: str) -> Tensor | None:
        values = getattr(trajectory, name)
        if values is None:
            return None
        device = next(self.model.parameters()).device
        return torch.from_numpy(values[trajectory.loss_mask]).to(device, self.accumulator)

    def _policy(self, logprobs: Tensor, old: Tensor, advantages: Tensor | None) -> Tensor:
        kind = self.loss.policy_loss.value
        if kind == "sft":
            return -logprobs
        assert advantages is not None
        low, high = 1 - self.loss.clip_low, 1 + self.loss.clip_high
        if kind == "cispo":
            weight = (logprobs.detach() - old).exp().clamp(low, high)
            return -weight * advantages * logprobs
        if kind == "gspo":
            mean = (logprobs.detach() - old).mean()
            ratio = (mean + logprobs - logprobs.detach()).exp()
        else:
            ratio = (logprobs - old).exp()
        unclipped, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
        objective = torch.where(clipped < unclipped, clipped, unclipped)
        if self.loss.clip_c is not None:
            floor = self.loss.clip_c * advantages
            objective = torch.where((advantages < 0) & (objective < floor), floor, objective)
        return -objective

    def _kl(self, log_ratio: Tensor) -> Tensor:
        kind = self.loss.kl_estimator.value
        if kind == "k1":
            return log_ratio
        if kind == "k2":
            return log_ratio.square() / 2
        return (-log_ratio).exp() + log_ratio - 1


def effective_routes(trajectories: Sequence[Trajectory], mismatch: str) -> list[Trajectory]:
    """Trajectories with the routes that they are to be run with.

    A missing row is taken from the trajectory of the group that knows it and shares most tokens, the first among equals. With
    `mismatch` "first", a position (token and next token) takes the rows of the first trajectory of its group that has it.
    """
    filled = []
    for mine in trajectories:
        assert mine.routes is not None
        routes = mine.routes.copy()
        donors = [t for t in trajectories if t.group == mine.group]
        donors.sort(key=lambda t: -_num_common(mine, t))
        for position, layer in np.argwhere((mine.routes < 0).any(-1)):
            for donor in donors:
                if _num_common(mine, donor) <= position or position >= len(donor.routes):  # type: ignore[arg-type]
                    continue
                row = donor.routes[position, layer]  # type: ignore[index]
                if (row >= 0).all():
                    routes[position, layer] = row
                    break
        filled.append(replace(mine, routes=routes))
    if mismatch == "exact":
        return filled
    settled = []
    for mine in filled:
        assert mine.routes is not None
        routes = mine.routes.copy()
        for other in reversed([t for t in filled if t.group == mine.group]):
            num_shared = max(_num_common(mine, other) - 1, 0)
            routes[:num_shared] = other.routes[:num_shared]  # type: ignore[index]
        settled.append(replace(mine, routes=routes))
    return settled


def _num_common(a: Trajectory, b: Trajectory) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a.tokens[:length] != b.tokens[:length])
    return int(differing[0]) if len(differing) else length


def _router_losses(num_trajectories: int) -> dict[str, float]:
    tracker = get_moe_layer_wise_logging_tracker()
    return {name: float(entry["values"].sum()) / num_trajectories for name, entry in tracker.items()}


def reference_config(config: Any) -> Any:
    """The same model on one process: no parallelism, no recomputation, and auxiliary losses that are means."""
    return replace(
        config,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        sequence_parallel=False,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        calculate_per_token_loss=False,
    )


def _torch_optimizer(parameters: Sequence[torch.nn.Parameter], settings: UpdateSettings) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.Adam(parameters, lr=settings.lr, betas=settings.adam_betas, eps=settings.adam_eps)


def _dtype(model: GPTModel) -> torch.dtype:
    return next(model.parameters()).dtype
