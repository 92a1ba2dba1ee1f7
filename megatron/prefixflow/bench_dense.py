"""An unmodified Megatron GPTModel with scaled-dot-product attention: what the dense side of the bench must not lose to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.prefixflow.arguments import Arguments, ddp_config, gpt_model_kwargs, transformer_config
from megatron.prefixflow.gradients import reduce_gradients
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.model import wrap_data_parallel
from prefixflow.plan.plan import Plan
from prefixflow.trajectories.types import Trajectory


class ScaledDotProductAttention(MegatronModule):
    """torch's causal attention in the place of Megatron's core attention; inputs [s, b, heads, d]."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        repeats = query.shape[2] // key.shape[2]
        q, k, v = (
            x.permute(1, 2, 0, 3)
            for x in (query, key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class UnmodifiedModel:
    """Forward-backward of packed trajectories of equal length, [b, s] a microbatch; one process.

    Raises ValueError for a layout of several processes or trajectories of different lengths.
    """

    def __init__(self, args: Arguments, groups: Groups) -> None:
        if groups.model_parallel.size() * groups.data_context.size() > 1:
            raise ValueError("bench --check-dense runs on one process; leave the layout out.")
        config = transformer_config(args)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
        model = GPTModel(config=config, transformer_layer_spec=spec, **gpt_model_kwargs(args))
        self.model = model.to(config.params_dtype).train()
        (self.ddp,) = wrap_data_parallel((self.model,), ddp_config(args))

    def microbatches(self, plan: Plan, trajectories: Sequence[Trajectory]) -> list[tuple[Tensor, Tensor]]:
        """(tokens [b, s + 1], trained rows [b, s]) of each dense microbatch of the plan."""
        if len({len(t.tokens) for t in trajectories}) != 1:
            raise ValueError("bench --check-dense takes trajectories of one length (a sweep cell).")
        made = []
        for m in plan.ranks[0]:
            members = [plan.forest.segments[s].source for s in m.segments]
            tokens = torch.stack([torch.from_numpy(trajectories[i].tokens.copy()) for i in members])
            masks = torch.stack([torch.from_numpy(trajectories[i].loss_mask.copy()) for i in members])
            made.append((tokens, masks[:, 1:]))
        return made

    def step(self, microbatches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.ddp.zero_grad_buffer()
        num_rows = sum(int(rows.sum()) for _, rows in microbatches)
        for tokens, rows in microbatches:
            length = tokens.shape[1] - 1
            rotary = self.model.rotary_pos_emb(length)
            hidden = self.model.embedding(input_ids=tokens[:, :-1], position_ids=None)
            hidden = self.model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
            weight = (
                self.model.shared_embedding_or_output_weight()
                if self.model.share_embeddings_and_output_weights
                else None
            )
            picked = hidden.transpose(0, 1)[rows]
            logits, _ = self.model.output_layer(picked.unsqueeze(1), weight=weight)
            loss = F.cross_entropy(logits[:, 0], tokens[:, 1:][rows], reduction="sum") / num_rows
            loss.backward()
        reduce_gradients([self.ddp])
