"""What one microbatch carries down to core attention.

Megatron hands `packed_seq_params` explicitly from the block to core attention, through the checkpointed path too, so
everything that an operation needs travels in a subclass of it: no globals. `qkv_format` stays "sbhd", which keeps
Megatron's packed-sequence (thd) branches off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


class LayerAttention(Protocol):
    """What core attention asks of a context: `AttentionContext` of a planned microbatch, or `DecodeContext`.

    `keys_only_layer` is the layer whose attention output nothing reads, None where there is none.
    """

    keys_only_layer: int | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float) -> Tensor:
        """q [T, n, d], k and v [T, n_kv, d] after RoPE -> [T, n, d]."""
        ...


@dataclass
class MicrobatchParams(PackedSeqParams):
    """Packed parameters with the attention context of one microbatch (upstream: `PackedSeqParams`)."""

    context: LayerAttention | None = None

    @classmethod
    def of(cls, context: LayerAttention) -> MicrobatchParams:
        return cls(qkv_format="sbhd", context=context)


def attention_context(packed_seq_params: PackedSeqParams | None) -> LayerAttention:
    """The context in `packed_seq_params`, or ValueError: the model was called without a plan."""
    context = getattr(packed_seq_params, "context", None)
    if context is None:
        raise ValueError(
            "PrefixFlow's core attention was called without a microbatch context: expected "
            f"packed_seq_params of type MicrobatchParams, got {type(packed_seq_params).__name__}. "
            "Run the model through megatron.prefixflow.step, which builds one from the plan."
        )
    return context
