"""What context parallelism moves in the layers of a model chunk, as the plan counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from prefixflow.plan.context import KVTraffic
from prefixflow.runtime.cache import accumulation_dtype


def kv_traffic(chunks: Sequence[Any], *, training: bool) -> KVTraffic:
    """Of all layers of this rank's model chunks."""
    gathered = reduced = 0
    for chunk in chunks:
        dtype = chunk.config.params_dtype
        for place, layer in enumerate(chunk.decoder.layers):
            attention = layer.self_attention
            num_elements = 2 * attention.num_query_groups_per_partition * attention.hidden_size_per_attention_head
            num_gathers = 1 + (training and _is_recomputed(chunk.config, place))
            gathered += num_gathers * num_elements * dtype.itemsize
            reduced += training * num_elements * accumulation_dtype(dtype).itemsize
    return KVTraffic(gathered, reduced)


def _is_recomputed(config: TransformerConfig, place: int) -> bool:
    """True where a backward runs the core attention of layer `place` of a chunk again."""
    if config.recompute_granularity == "full":
        return config.recompute_method == "uniform" or place < (config.recompute_num_layers or 0)
    return config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
