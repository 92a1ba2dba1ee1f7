"""What context parallelism moves in the layers of a model chunk, and what it keeps for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from prefixflow.plan.context import KVTraffic
from prefixflow.plan.ring import RingTraffic
from prefixflow.runtime.cache import accumulation_dtype


def kv_traffic(chunks: Sequence[Any], *, training: bool) -> KVTraffic:
    """Of all layers of this rank's model chunks."""
    gathered = regathered = reduced = 0
    for chunk in chunks:
        dtype = chunk.config.params_dtype
        for place, layer in enumerate(chunk.decoder.layers):
            attention = layer.self_attention
            num_elements = 2 * attention.num_query_groups_per_partition * attention.hidden_size_per_attention_head
            gathered += num_elements * dtype.itemsize
            if training and _is_recomputed(chunk.config, place):
                regathered += num_elements * dtype.itemsize
            reduced += training * num_elements * accumulation_dtype(dtype).itemsize
    return KVTraffic(gathered, regathered, reduced)


def recomputes_attention(chunk: Any) -> bool:
    """True where a backward runs the core attention of any layer of `chunk` again."""
    return any(_is_recomputed(chunk.config, place) for place in range(len(chunk.decoder.layers)))


def ring_traffic(chunks: Sequence[Any], *, training: bool, keys_only: bool = False) -> RingTraffic:
    """Of all layers of this rank's model chunks, with K/V sharded; keys_only: the last of each chunk only stores its K/V."""
    total = [0, 0, 0, 0]
    for chunk in chunks:
        dtype = chunk.config.params_dtype
        for place, layer in enumerate(chunk.decoder.layers):
            if keys_only and place + 1 == len(chunk.decoder.layers):
                break
            attention = layer.self_attention
            num_elements = 2 * attention.num_query_groups_per_partition * attention.hidden_size_per_attention_head
            num_turns = 1 + training + (training and _is_recomputed(chunk.config, place))
            moved = (
                num_turns * num_elements * dtype.itemsize,
                training * num_elements * accumulation_dtype(dtype).itemsize,
            )
            # See `StageRunner`: a router's losses would read the output.
            is_tail = layer.layer_number == chunk.config.num_layers and chunk.config.num_moe_experts is None
            total = [a + b for a, b in zip(total, (*moved, *(is_tail * bytes_ for bytes_ in moved)), strict=True)]
    return RingTraffic(*total)


def _is_recomputed(config: TransformerConfig, place: int) -> bool:
    """True where a backward runs the core attention of layer `place` of a chunk again."""
    if config.recompute_granularity == "full":
        return config.recompute_method == "uniform" or place < (config.recompute_num_layers or 0)
    return config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
