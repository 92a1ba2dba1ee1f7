"""The router of a MoE layer under a plan (upstream: `TopKRouter`).

Megatron's `MoELayer` hands its router nothing but hidden states, so what an operation needs is set on each router object
before the operation, F *and* B, and taken off after it (`megatron.prefixflow.routing`). Called without a context, a router of
ours raises, and one of a model that somebody else built (`megatron.prefixflow.attach`) does what it did before.

* Routes that F took are pinned: a recomputation inside B takes the same ones, whatever ran in between. Given routes
  (`--routing-replay rollout`) are taken in F too; a row with a -1 is routed natively. Probabilities are gathered from
  the scores of all experts, by Megatron's own function.
* Auxiliary losses and z-loss are those of whole trajectories (`prefixflow.runtime.router_losses`), not Megatron's, which
  would count a shared prefix once and bind the counts too early.
* Expert-bias counts weigh a position by its trajectories, in F of training only; padding counts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from prefixflow.runtime.attention.function import Operation
from prefixflow.runtime.router_losses import AddedGradient, RouterLossConfig, RouterLosses, segment_counts

ROUTE_DTYPE = torch.int16
"""Of routes that wait for their B: they add up over microbatches in flight, layers and top-k."""


@dataclass(slots=True, eq=False)
class RoutingContext:
    """What the routers of one model chunk need of one microbatch, and what they leave behind.

    Arrays are of this rank's rows [rows] (under sequence parallelism a part of the microbatch's tokens).

    segments: of the microbatch; segment_of: index into them, their number for padding.
    multiplicity, mean_weight: see `MicrobatchArrays`.
    losses: None in a pass that only scores.
    given: routes [rows, top-k] by layer number that F must take, rows with a -1 excepted.
    chosen: routes [rows, top-k] by layer number that F took; what is in it is taken again.
    counts: by layer number [segments, E], of the load-balancing loss; F leaves them.
    """

    segments: tuple[int, ...]
    segment_of: Tensor
    multiplicity: Tensor
    mean_weight: Tensor
    losses: RouterLosses | None
    layers: tuple[int, ...]
    given: Mapping[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    operation: Operation = Operation.FORWARD
    calls: Counter[int] = field(default_factory=Counter)
    _score_gradients: Tensor | None = None

    def with_z_loss(self, logits: Tensor) -> Tensor:
        """Logits [rows, E] that owe the z-loss its gradient."""
        if self.losses is None or not self.losses.config.z:
            return logits
        return AddedGradient.apply(logits, torch.logsumexp(logits, dim=-1).square(), self._z_gradient)

    def with_load_balancing(self, layer: int, probs: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """`probs`, through which the backward reaches `scores` [rows, E] with the gradient of the loss.

        chosen [rows, E]: the top-k of the scores, which are not always the routes taken.
        """
        assert self.losses is not None
        if self.operation is Operation.FORWARD:
            self.counts[layer] = segment_counts(chosen, self.segment_of, len(self.segments))
        place = self.layers.index(layer)
        return AddedGradient.apply(probs, scores, lambda values: self._balance_gradient(place, values))

    def _z_gradient(self, values: Tensor) -> Tensor:
        assert self.losses is not None
        gradient = self.losses.z_gradients(self.mean_weight).to(values.dtype)
        self.losses.z_value += (values * gradient).sum()
        return gradient

    def _balance_gradient(self, place: int, values: Tensor) -> Tensor:
        """[rows, E]; runs in backward, when the counts of all paths through the microbatch are known."""
        assert self.losses is not None
        if self._score_gradients is None:
            of_segments = self.losses.score_gradients(self.segments)
            # The last row is that of padding, the only one of a dummy.
            of_padding = of_segments.new_zeros(1, *of_segments.shape[1:])
            self._score_gradients = torch.cat([of_segments, of_padding])
        gradient = self._score_gradients[self.segment_of, place].to(values.dtype)
        self.losses.load_balancing_value += (values * gradient).sum()
        return gradient


@dataclass(slots=True)
class TopKChoice:
    """Chooses experts in one call of a router; stands where Megatron's function expects its `RouterReplay`.

    pinned [rows, top-k]: routes to take; without `is_complete`, rows with a -1 are chosen natively.
    indices [rows, top-k]: what was taken.
    """

    pinned: Tensor | None
    is_complete: bool
    indices: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, native: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [rows, top-k] of the experts to take, out of `scores` [rows, E]."""
        if self.pinned is not None and self.is_complete:
            self.indices = self.pinned
        else:
            values, self.indices = native(scores, topk, num_groups=num_groups, group_topk=group_topk)
            if self.pinned is None:
                return values, self.indices
            is_known = (self.pinned >= 0).all(dim=1, keepdim=True)
            self.indices = torch.where(is_known, self.pinned, self.indices)
        return scores.gather(1, self.indices), self.indices


class PlannedRouter(TopKRouter):
    """Megatron's top-k router; under a context with pinned routes, exact losses and logical counts."""

    context: RoutingContext | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map [rows, E] of hidden states [rows, 1, h]."""
        if self.context is None:
            return super().forward(input, padding_mask)
        context, layer = self.context, self.layer_number
        context.calls[layer] += 1
        logits = context.with_z_loss(self.gating(input).view(-1, self.num_experts))
        choice = self._choice(context, layer)
        probs, routing_map = self._route(logits, choice)
        assert choice.indices is not None
        if context.operation is not Operation.BACKWARD:
            context.chosen[layer] = choice.indices.to(ROUTE_DTYPE)
        if context.losses is not None and context.losses.config.load_balancing:
            chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
            probs = context.with_load_balancing(layer, probs, scores, chosen)
        if self.enable_expert_bias and context.operation is Operation.FORWARD:
            with torch.no_grad():
                self.local_tokens_per_expert += (routing_map * context.multiplicity.unsqueeze(1)).sum(0)
        return probs, routing_map

    def keep_buffers_float32(self) -> None:
        """Counts must be exact and equal in dtype on all ranks, whatever the dtype of the parameters."""
        if self.enable_expert_bias:
            self._maintain_float32_expert_bias()
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.data.to(torch.float32)

    def _choice(self, context: RoutingContext, layer: int) -> TopKChoice:
        if layer in context.chosen:
            return TopKChoice(context.chosen[layer].long(), is_complete=True)
        assert context.operation is not Operation.BACKWARD, f"layer {layer} is recomputed, but F left no routes"
        return TopKChoice(context.given.get(layer), is_complete=False)

    def _route(self, logits: Tensor, choice: TopKChoice) -> tuple[Tensor, Tensor]:
        config = self.config
        return topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=choice,
        )


class SegmentRouter(PlannedRouter):
    """The router of a model that we build, which runs under a context only."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        check_router(config)
        super().__init__(config=config, pg_collection=pg_collection)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `PlannedRouter.forward`; ValueError without a context."""
        if self.context is None:
            raise ValueError(
                f"The router of layer {self.layer_number} was called without a routing context: expected one to be set "
                "for each operation. Run the model through megatron.prefixflow.step, which sets it from the plan."
            )
        return super().forward(input, padding_mask)


def router_loss_config(config: TransformerConfig) -> RouterLossConfig:
    """The losses of the model's routers; `aux_loss` and `seq_aux_loss` add, since they are the same here."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    assert isinstance(coefficients, list)
    return RouterLossConfig(
        num_experts=config.num_moe_experts or 0,
        topk=config.moe_router_topk,
        load_balancing=sum(
            c for kind, c in zip(kinds, coefficients, strict=True) if kind in ("aux_loss", "seq_aux_loss")
        ),
        z=config.moe_z_loss_coeff or 0.0,
    )


def has_router_terms(config: TransformerConfig) -> bool:
    """True where every trajectory's positions matter beyond its rows: router losses, or expert-bias counts."""
    if config.num_moe_experts is None:
        return False
    moves_biases = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate != 0
    return moves_biases or router_loss_config(config).has_terms


def check_router(config: TransformerConfig) -> None:
    """ValueError names the first option under which a shared position would not be routed as a repeated one."""
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    refused = {
        "moe_router_load_balancing_type sinkhorn": "sinkhorn" in kinds,
        "moe_router_load_balancing_type global_aux_loss": "global_aux_loss" in kinds,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_input_jitter_eps": config.moe_input_jitter_eps is not None,
        "moe_router_force_load_balancing": config.moe_router_force_load_balancing,
        "moe_router_fusion": config.moe_router_fusion,
        "moe_enable_routing_replay": config.moe_enable_routing_replay,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"{name} is not exact under prefix reuse: expected it to be left out of the model configuration. "
                "docs/refused.md gives the reason and the way out."
            )
