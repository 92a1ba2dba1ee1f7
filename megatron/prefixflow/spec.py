"""Layer specs: Megatron's own layers with our core attention inside.

Seams (docs/seams.md): `core_attention` of `SelfAttentionSubmodules`; the norms, since Megatron's local-spec norm rejects
sequence parallelism; and the layer class, whose MLP is dead compute in the last layer of a microbatch without rows.
With Transformer Engine its spec serves for linear layers and norms.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatron.prefixflow.params import LayerAttention, MicrobatchParams, attention_context
from megatron.prefixflow.router import SegmentRouter


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def default_softmax_scale(config: TransformerConfig) -> float:
    """What attention scores are multiplied by, where nothing else is asked for."""
    return config.softmax_scale if config.softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)


class SegmentAttention(torch.nn.Module):
    """Attention over the slices of a microbatch, for modules that stand as core attention.

    Takes query [T, 1, n_heads/tp, d], key and value [T, 1, n_kv/tp, d] after RoPE; returns [T, 1, n_heads/tp * d].
    """

    layer_number: int

    def attend(self, context: LayerAttention, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
        queries, keys, values = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        out = context.attend(queries, keys, values, layer=self.layer_number, scale=scale)
        return out.reshape(out.shape[0], 1, -1)


class SegmentCoreAttention(SegmentAttention, MegatronModule):
    """Core attention of a model that we build (upstream: `DotProductAttention`).

    Masks, dropout and `attention_bias` are not read: the slices say what attends to what.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = default_softmax_scale(config) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        return self.attend(attention_context(packed_seq_params), query, key, value, scale=self.softmax_scale)


class SegmentTransformerLayer(TransformerLayer):
    """Megatron's layer, without the MLP where nothing reads its output (`keys_only_layer`)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("packed_seq_params")
        if isinstance(params, MicrobatchParams) and attention_context(params).keys_only_layer == self.layer_number:
            kwargs.pop("dynamic_inference_decode_only", None)
            return self._forward_attention(*args, **kwargs)
        return super().forward(*args, **kwargs)


class SequenceParallelNorm:
    """torch's RMSNorm or LayerNorm whose parameters are marked for Megatron's sequence-parallel gradient all-reduce.

    A class, not a function: Megatron's `build_module` returns functions uncalled.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, use_te: bool | None = None
) -> TransformerBlockSubmodules:
    """Spec of the layers of this pipeline stage, with our core attention, layer class and (local) norms.

    use_te: Transformer Engine's modules; by default where it is installed.
    """
    use_te = has_transformer_engine() if use_te is None else use_te
    layers = get_gpt_decoder_layer_specs(config, use_te, config.normalization)
    for layer in layers:
        _adapt_layer(layer, use_te)
    start = get_transformer_layer_offset(config, vp_stage=vp_stage)
    chosen = layers[start : start + get_num_layers_to_build(config, vp_stage=vp_stage)]
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layer_specs=chosen, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=chosen, layer_norm=SequenceParallelNorm)


def _adapt_layer(layer: ModuleSpec, use_te: bool) -> None:
    layer.module = SegmentTransformerLayer
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SegmentCoreAttention
    experts = layer.submodules.mlp.submodules
    if isinstance(experts, MoESubmodules):
        experts.router = SegmentRouter
    if use_te:
        return
    layer.submodules.input_layernorm = SequenceParallelNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) not in (None, IdentityOp):
            setattr(attention, name, SequenceParallelNorm)
