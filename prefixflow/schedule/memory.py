"""Bytes of the things that a rank holds, from the model's shape and the layout.

`prefixflow.schedule.footprint` walks one layer; `prefixflow.schedule.peak` walks a table of operations.

Phases: A, a forward that others read; B, a microbatch that nothing else reads; C, the delayed backward.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from prefixflow.plan.context import ContextKV, context_shards
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.shapes import FP32_BYTES, ModelShape
from prefixflow.schedule.footprint import AttentionPart, LayerSizes
from prefixflow.schedule.ops import Kind

LOGIT_CHUNK_ROWS = 256
# Adam in mixed precision: fp32 master weights and two moments.
OPTIMIZER_BYTES = 12
# Of a row from F to B: label, place, entry and its index (8 each), log-probability, maximum, factor, temperature (4 each).
ROW_BYTES = 48
SHORTEST_ROTARY_TABLE = 1024


class Phase(enum.Enum):
    PREFIX_FORWARD = "A"
    SUFFIX = "B"
    PREFIX_BACKWARD = "C"


class Holder(enum.Enum):
    """What bytes on the device belong to."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    KEYS_VALUES = "kv"
    KV_GRADIENTS = "kv_gradients"
    LOGITS = "logits"
    COMMUNICATION = "communication"
    WORKING = "working"


STATE = (Holder.WEIGHTS, Holder.GRADIENTS, Holder.OPTIMIZER)
"""There throughout a step; the others come and go."""


class Recompute(enum.Enum):
    """Megatron's own recomputation: of nothing, of core attention, of every layer by itself."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes of things on one rank.

    element_bytes of weights and activations. stage_layers: of each global stage, pipeline rank r having stages r, r + p, ...;
    empty where all have as many. context_parallel divides what belongs to positions; with
    gathered K/V (context_kv) not K/V and gK/gV, which each rank holds whole. expert_parallel: ranks that share a stage's routed experts, expert times expert-tensor parallel;
    tensor_parallel leaves them. optimizer_shards, expert_optimizer_shards: ranks that the distributed optimizer divides its
    state over, of routed experts apart, which have data-parallel groups of their own.
    fused: kernels as on a GPU; otherwise torch's own operations, as on the CPU.
    """

    shape: ModelShape
    element_bytes: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] = ()
    padded_vocab_size: int | None = None
    optimizer_shards: int = 1
    expert_optimizer_shards: int = 1
    fused: bool = True
    context_kv: ContextKV = ContextKV.GATHER

    @property
    def wide_bytes(self) -> int:
        """Of a number in sums: gradients, logits, gK/gV."""
        return max(self.element_bytes, FP32_BYTES)

    @property
    def num_stages(self) -> int:
        return len(self.stage_layers) or self.pipeline_parallel

    def layers(self, stage: int) -> int:
        """Of a global stage."""
        return self.stage_layers[stage] if self.stage_layers else self.shape.num_layers // self.pipeline_parallel

    def stages(self, pipeline_rank: int) -> range:
        """Global stages of a pipeline rank."""
        return range(pipeline_rank, self.num_stages, self.pipeline_parallel)

    @property
    def state_bytes(self) -> int:
        """Weights, main gradients and the optimizer's state of the pipeline rank that has most."""
        return max(sum(self.state(rank).values()) for rank in range(self.pipeline_parallel))

    def state(self, pipeline_rank: int) -> dict[Holder, int]:
        """Weights, main gradients and the optimizer's state of a pipeline rank; buckets are not padded here."""
        stages = self.stages(pipeline_rank)
        num_parameters = sum(map(self._num_parameters, stages))
        num_experts = sum(map(self._num_expert_parameters, stages))
        # Without a wide copy Adam keeps two moments.
        optimizer = OPTIMIZER_BYTES if self.element_bytes < FP32_BYTES else 2 * self.element_bytes
        return {
            Holder.WEIGHTS: num_parameters * self.element_bytes,
            Holder.GRADIENTS: num_parameters * self.wide_bytes,
            Holder.OPTIMIZER: (num_parameters - num_experts) * optimizer // self.optimizer_shards
            + num_experts * optimizer // self.expert_optimizer_shards,
        }

    def _num_parameters(self, stage: int) -> int:
        """On one rank; layers count as if all had experts to the same extent."""
        shape = self.shape
        dense = shape.num_total_body_parameters - shape.hidden_size - shape.num_expert_parameters
        body = dense // self.tensor_parallel + shape.num_expert_parameters // self.expert_parallel
        tables = [stage == 0, stage == self.num_stages - 1]
        num_tables = any(tables) if shape.tied_embeddings and self.num_stages == 1 else sum(tables)
        table = self.vocab_rows * shape.hidden_size
        return body * self.layers(stage) // shape.num_layers + num_tables * table + tables[1] * shape.hidden_size

    def _num_expert_parameters(self, stage: int) -> int:
        """Of `_num_parameters` those of routed experts."""
        shape = self.shape
        return shape.num_expert_parameters // self.expert_parallel * self.layers(stage) // shape.num_layers

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the LM head, on one rank."""
        return (self.padded_vocab_size or self.shape.vocab_size) // self.tensor_parallel

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the layers of one rank, where all have as many; sharded K/V as if every rank held part of every position."""
        return self.shape.kv_bytes_per_token(self.element_bytes) // self._kv_parts

    @property
    def kv_gradient_bytes_per_token(self) -> int:
        return self.shape.kv_gradient_bytes_per_token(self.element_bytes) // self._kv_parts

    @property
    def _kv_parts(self) -> int:
        """Ranks that share K/V of a position."""
        return self.tensor_parallel * self.pipeline_parallel * (self.context_parallel if self.rotates_keys else 1)

    @property
    def gathers_keys(self) -> bool:
        return self.context_parallel > 1 and self.context_kv is ContextKV.GATHER

    @property
    def rotates_keys(self) -> bool:
        return self.context_parallel > 1 and self.context_kv is ContextKV.RING

    @property
    def recomputes_attention(self) -> bool:
        return self.recompute is not Recompute.NONE

    @property
    def reads_own_keys(self) -> bool:
        """True where a recomputation takes what its microbatch wrote from the cache instead of gathering it again."""
        return self.gathers_keys and self.recomputes_attention

    def ring_bytes(self, num_positions: int, kind: Kind) -> int:
        """Shards of one layer under way, of `num_positions` own and cached ones together, beside those at rest.

        Two of K/V, the one at hand and the one that comes; in a backward three of gradients, the one at work, the one that
        leaves and the one that comes.
        """
        if not self.rotates_keys:
            return 0
        of_layer = 2 * self.kv_bytes_per_token
        if kind is Kind.BACKWARD:
            of_layer += 3 * self.kv_gradient_bytes_per_token
        return num_positions * of_layer * self.pipeline_parallel // self.shape.num_layers

    def logit_bytes(self, num_rows: int, *, whole: bool = False) -> int:
        """Logits alive at once: a chunk of rows, or those of all."""
        rows = num_rows if whole else min(num_rows, LOGIT_CHUNK_ROWS)
        return rows * (self.shape.vocab_size // self.tensor_parallel) * self.wide_bytes

    def keeps_logits(self, microbatch: Microbatch, num_rows: int, stage: int) -> bool:
        """True where the logits of all rows are worth keeping for a backward that follows at once: they take no more than the
        microbatch's activations within MLPs, or than a chunk. num_rows: on this context-parallel rank."""
        whole = self.logit_bytes(num_rows, whole=True)
        return whole <= max(self._mlp_bytes(microbatch, stage), self.logit_bytes(num_rows))

    def _mlp_bytes(self, microbatch: Microbatch, stage: int) -> int:
        """Alive together on one rank: of all layers of a stage, of one where all are recomputed."""
        shape = self.shape
        num_layers = 1 if self.recompute is Recompute.FULL else self.layers(stage)
        width = shape.moe_topk * shape.moe_ffn_hidden_size if shape.is_moe else shape.ffn_hidden_size
        # What the activation reads, one or two, and what it makes.
        num_tensors = 3 if shape.gated else 2
        return num_layers * self.tokens(microbatch) * num_tensors * width // self.tensor_parallel * self.element_bytes

    def tokens(self, microbatch: Microbatch) -> int:
        """Positions of a microbatch on one context-parallel rank."""
        return microbatch.num_physical_tokens // self.context_parallel

    def message_bytes(self, microbatch: Microbatch) -> int:
        """Hidden states between two stages."""
        return self.tokens(microbatch) // self.sequence_split * self.shape.hidden_size * self.element_bytes

    @property
    def sequence_split(self) -> int:
        return self.tensor_parallel if self.sequence_parallel else 1

    def layer(self, microbatch: Microbatch, routed_tokens: float, block_tokens: Sequence[int]) -> LayerSizes:
        """Of a microbatch in one layer. routed_tokens: positions of a rank whose experts work with this one's, on average;
        block_tokens: of each segment."""
        shape, tp = self.shape, self.tensor_parallel
        tokens = self.tokens(microbatch)
        experts = None
        if shape.is_moe:
            num_experts = max(1, shape.num_experts // self.expert_parallel)
            rows = round(routed_tokens * shape.moe_topk / self.sequence_split / self.context_parallel)
            experts = (rows, num_experts, shape.moe_ffn_hidden_size)
        return LayerSizes(
            element=self.element_bytes,
            tokens=tokens,
            normed_tokens=tokens // self.sequence_split,
            key_tokens=tokens if self.rotates_keys else microbatch.num_physical_tokens,
            hidden=shape.hidden_size,
            query=shape.num_attention_heads * shape.kv_channels // tp,
            key=shape.num_query_groups * shape.kv_channels // tp,
            channels=shape.kv_channels,
            heads=shape.num_attention_heads // tp,
            ffn=shape.ffn_hidden_size // tp,
            gated=shape.gated,
            parts=self._attention_parts(microbatch, block_tokens),
            gathers_keys=self.gathers_keys,
            experts=experts,
            router=shape.num_experts,
            fused=self.fused,
        )

    def _attention_parts(self, microbatch: Microbatch, block_tokens: Sequence[int]) -> tuple[AttentionPart, ...]:
        """Of the first context-parallel rank; the others differ by a position a slice."""
        local, cached = microbatch.local, microbatch.cached
        if self.context_parallel > 1:
            shard = context_shards(microbatch, self.context_parallel)[0]
            local, cached = shard.local_slices(local), shard.cached_slices(cached)
        parts = [AttentionPart(len(s.queries), len(s.keys), s.causal) for s in local]
        for piece in cached:
            num_keys = sum(block_tokens[block] for block in piece.blocks)
            parts.append(AttentionPart(len(piece.queries), num_keys, causal=False, blocks=len(piece.blocks)))
        return tuple(sorted(parts, key=lambda part: not part.causal))


def phase_of(microbatch: Microbatch, kind: Kind) -> Phase:
    """Phase of an operation on `microbatch`: B where nothing else reads it."""
    if not microbatch.writes:
        return Phase.SUFFIX
    return Phase.PREFIX_FORWARD if kind is Kind.FORWARD else Phase.PREFIX_BACKWARD
