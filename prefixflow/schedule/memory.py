"""Predict the memory of one data-parallel rank by walking its table of operations.

Strategy: replay the row; after each operation add up what is alive. *State* (weights, gradients, optimizer) is there
always. A forward leaves its microbatch's activations until its backward (layer inputs only, under full recomputation,
which adds one layer's activations while a backward runs). K/V of a written segment live until their last reader's
backward, and where context-parallel ranks recompute attention until the writer's, which takes its own from there; gK/gV from the first reader's backward to the writer's own. Logits of the rows are alive in chunks.

Phases: A, a forward that others read; B, a microbatch that nothing else reads; C, the delayed backward.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixflow.plan.context import ContextKV
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan
from prefixflow.plan.shapes import FP32_BYTES, ModelShape
from prefixflow.schedule.ops import Kind, Op

LOGIT_CHUNK_ROWS = 256
# Adam in mixed precision: fp32 master weights and two moments.
OPTIMIZER_BYTES = 12


class Phase(enum.Enum):
    PREFIX_FORWARD = "A"
    SUFFIX = "B"
    PREFIX_BACKWARD = "C"


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes of things on one rank, from the model's shape.

    element_bytes of weights and activations. tensor_parallel divides all but layer inputs; pipeline_parallel all but
    logits, as if layers, embedding and head were spread evenly. context_parallel divides what belongs to positions; with
    gathered K/V not K/V and gK/gV, which each rank holds whole: those of cached segments, and those that a kept or running
    layer works on. With sharded ones it divides these too, and shards are under way while an operation runs.
    expert_parallel: ranks that share a stage's routed experts, expert times expert-tensor parallel; tensor_parallel leaves them.
    recomputes_attention: in a backward, under full recomputation and under selective where it covers core attention.
    """

    shape: ModelShape
    element_bytes: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    full_recompute: bool = False
    context_kv: ContextKV = ContextKV.GATHER
    recomputes_attention: bool = False

    @property
    def _model_parallel(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def state_bytes(self) -> int:
        """Weights, fp32 main gradients and the optimizer's state; the distributed optimizer needs less."""
        optimizer = OPTIMIZER_BYTES if self.element_bytes < FP32_BYTES else 2 * self.element_bytes
        gradient = max(self.element_bytes, FP32_BYTES)
        per_parameter = self.element_bytes + gradient + optimizer
        num_experts = self.shape.num_expert_parameters
        num_local = (
            self.shape.num_parameters - num_experts
        ) // self.tensor_parallel + num_experts // self.expert_parallel
        return num_local * per_parameter // self.pipeline_parallel

    @property
    def kept_bytes_per_token(self) -> int:
        """What a forward leaves behind for its backward."""
        if self.full_recompute:
            inputs = self.shape.layer_input_bytes_per_token(self.element_bytes) // self.pipeline_parallel
            return inputs // self.context_parallel
        own = self.shape.activation_bytes_per_token(self.element_bytes) // self._model_parallel
        return own // self.context_parallel + self._foreign_kv_bytes_per_token

    @property
    def working_bytes_per_token(self) -> int:
        """What a running backward needs beyond that: the recomputed layer, or gradients of one layer's activations."""
        whole = self.shape.activation_bytes_per_token(self.element_bytes) // self.tensor_parallel
        of_layer = whole // self.shape.num_layers // self.context_parallel
        return of_layer + self._foreign_kv_bytes_per_token * self.pipeline_parallel // self.shape.num_layers

    @property
    def _foreign_kv_bytes_per_token(self) -> int:
        """K/V of a microbatch that belong to the positions of other context-parallel ranks."""
        return self.kv_bytes_per_token * (self._num_kv_holders - 1) // self._num_kv_holders

    @property
    def _num_kv_holders(self) -> int:
        """Context-parallel ranks that hold K/V whole."""
        return self.context_parallel if self.context_kv is ContextKV.GATHER else 1

    @property
    def _kv_parts(self) -> int:
        """Ranks that share K/V of a position."""
        return self._model_parallel * self.context_parallel // self._num_kv_holders

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.element_bytes) // self._kv_parts

    @property
    def kv_gradient_bytes_per_token(self) -> int:
        return self.shape.kv_gradient_bytes_per_token(self.element_bytes) // self._kv_parts

    def ring_bytes(self, num_positions: int, kind: Kind) -> int:
        """Shards of one layer under way, of `num_positions` own and cached ones together, beside those at rest.

        Two of K/V, the one at hand and the one that comes; in a backward three of gradients, the one at work, the one that
        leaves and the one that comes.
        """
        if self.context_kv is ContextKV.GATHER:
            return 0
        of_layer = 2 * self.kv_bytes_per_token
        if kind is Kind.BACKWARD:
            of_layer += 3 * self.kv_gradient_bytes_per_token
        return num_positions * of_layer * self.pipeline_parallel // self.shape.num_layers

    def logit_bytes(self, num_rows: int) -> int:
        rows = min(num_rows, LOGIT_CHUNK_ROWS)
        return rows * self.shape.vocab_size * FP32_BYTES // self.tensor_parallel


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Bytes alive on one rank while `op` runs, by what holds them; the state comes on top.

    activations: left by forwards whose backward is still to come; keys_values: cached K/V; gradients: gK/gV;
    working: what the operation itself needs while it runs, the chunk of logits and shards under way included.
    """

    op: Op
    phase: Phase
    activations: int
    keys_values: int
    gradients: int
    working: int

    @property
    def total_bytes(self) -> int:
        return self.activations + self.keys_values + self.gradients + self.working


def phase_of(microbatch: Microbatch, kind: Kind) -> Phase:
    """Phase of an operation on `microbatch`: B where nothing else reads it."""
    if not microbatch.writes:
        return Phase.SUFFIX
    return Phase.PREFIX_FORWARD if kind is Kind.FORWARD else Phase.PREFIX_BACKWARD


def memory_curve(plan: Plan, data_rank: int, row: Sequence[Op], memory: MemoryModel) -> tuple[MemoryPoint, ...]:
    """What is alive during each operation of a rank's row, in the row's order."""
    walk = _Walk(plan, data_rank, memory)
    return tuple(walk.run(op) for op in row)


def peak_bytes(plan: Plan, data_rank: int, row: Sequence[Op], memory: MemoryModel) -> dict[Phase, int]:
    """Largest bytes alive in each phase of a rank's row; a phase without operations has the state alone."""
    peaks = dict.fromkeys(Phase, memory.state_bytes)
    for point in memory_curve(plan, data_rank, row, memory):
        peaks[point.phase] = max(peaks[point.phase], memory.state_bytes + point.total_bytes)
    return peaks


class _Walk:
    def __init__(self, plan: Plan, data_rank: int, memory: MemoryModel) -> None:
        self.microbatches = plan.ranks[data_rank]
        self.memory = memory
        self.lengths = [len(segment) for segment in plan.forest.segments]
        gathers = memory.context_parallel > 1 and memory.context_kv is ContextKV.GATHER
        self.reads_own = memory.recomputes_attention and gathers
        self.open_readers = Counter(block for m in self.microbatches for block in self._read_blocks(m))
        self.kept = 0
        self.keys_values = 0
        self.gradients: dict[int, int] = {}

    def run(self, op: Op) -> MemoryPoint:
        """What is alive while the operation runs; what it frees is gone for the next one."""
        m = self.microbatches[op.microbatch]
        kept = m.num_physical_tokens * self.memory.kept_bytes_per_token
        if op.kind is Kind.FORWARD:
            self.kept += kept
            self.keys_values += self._kv(m.writes)
            return self._alive(op, m)
        for block in {b for c in m.cached for b in c.blocks}:
            self.gradients[block] = self.lengths[block] * self.memory.kv_gradient_bytes_per_token
        alive = self._alive(op, m)
        self._finish(m, kept)
        return alive

    def _alive(self, op: Op, m: Microbatch) -> MemoryPoint:
        num_read = sum(self.lengths[block] for cached in m.cached for block in cached.blocks)
        under_way = self.memory.ring_bytes(m.num_physical_tokens + num_read, op.kind)
        working = m.num_physical_tokens * self.memory.working_bytes_per_token + self.memory.logit_bytes(m.num_tokens)
        return MemoryPoint(
            op=op,
            phase=phase_of(m, op.kind),
            activations=self.kept,
            keys_values=self.keys_values,
            gradients=sum(self.gradients.values()),
            working=working + under_way,
        )

    def _finish(self, m: Microbatch, kept: int) -> None:
        self.kept -= kept
        for block in self._read_blocks(m):
            self.open_readers[block] -= 1
            if not self.open_readers[block]:
                self.keys_values -= self._kv((block,))
        for block in m.writes:
            self.gradients.pop(block, None)

    def _read_blocks(self, m: Microbatch) -> Iterator[int]:
        """Blocks whose K/V must be there until the backward of `m`; one may come several times."""
        for cached in m.cached:
            yield from cached.blocks
        if self.reads_own:
            yield from m.writes

    def _kv(self, blocks: Sequence[int]) -> int:
        return sum(self.lengths[b] for b in blocks) * self.memory.kv_bytes_per_token
