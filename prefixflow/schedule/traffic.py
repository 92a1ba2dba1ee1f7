"""What context-parallel ranks receive of K/V and their gradients in a training step (pure).

The forwards that a step runs move K/V once each, those that are run again for memory too: a dormant microbatch whose
activations are recomputed, and one whose dropped K/V are (`schedule.residency`). A binding counts the same from its layers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prefixflow.plan.context import ContextKV, KVTraffic
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan
from prefixflow.plan.ring import RingTraffic, rowless
from prefixflow.schedule.fit import MemoryChoice
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.residency import ActivationPolicy, MemoryPlan, Move


def received_bytes(plan: Plan, memory: MemoryModel, choice: MemoryChoice, rows: Sequence[int]) -> int:
    """Of all ranks together; `rows[i]`: head rows of segment i."""
    if memory.context_parallel == 1:
        return 0
    total = 0
    for data_rank, pipeline_rank in itertools.product(range(len(plan.ranks)), range(memory.pipeline_parallel)):
        moves = choice.memory_plan(plan, data_rank, pipeline_rank, memory, None, training=True)
        if memory.context_kv is ContextKV.RING:
            total += _sharded(plan.ranks[data_rank], pipeline_rank, memory, moves, rows)
        else:
            total += _gathered(plan.ranks[data_rank], pipeline_rank, memory, moves)
    return total


def _gathered(microbatches: Sequence[Microbatch], pipeline_rank: int, memory: MemoryModel, moves: MemoryPlan) -> int:
    size = memory.context_parallel
    num_layers = sum(map(memory.layers, memory.stages(pipeline_rank)))
    kv_bytes, gradient_bytes = _bytes_of_layer(memory)
    traffic = KVTraffic(
        gathered_bytes=num_layers * kv_bytes,
        regathered_bytes=num_layers * kv_bytes if memory.recomputes_attention else 0,
        reduced_bytes=num_layers * gradient_bytes,
    )
    total = traffic.num_bytes(microbatches, size, reads_own=not moves)
    for stage, m, _ in _run_again(moves):
        total += KVTraffic(memory.layers(stage) * kv_bytes, 0, 0).num_bytes([microbatches[m]], size)
    return size * total


def _sharded(
    microbatches: Sequence[Microbatch], pipeline_rank: int, memory: MemoryModel, moves: MemoryPlan, rows: Sequence[int]
) -> int:
    size = memory.context_parallel
    without_rows = rowless(microbatches, rows)
    again: defaultdict[tuple[int, bool], list[Microbatch]] = defaultdict(list)
    for stage, m, writes_only in _run_again(moves):
        again[stage, writes_only].append(microbatches[m])
    parts: list[tuple[RingTraffic, list[Microbatch] | None]]
    parts = [
        (_ring_traffic(memory, stage, 2 + memory.recomputes_attention), None) for stage in memory.stages(pipeline_rank)
    ]
    parts += [
        # Of the last layer only the K/V are wanted then.
        (_ring_traffic(memory, stage, 1, num_idle_layers=int(writes_only)), counted)
        for (stage, writes_only), counted in again.items()
    ]
    return sum(
        traffic.num_bytes(microbatches, size, context_rank, without_rows, counted=counted)
        for traffic, counted in parts
        for context_rank in range(size)
    )


def _ring_traffic(memory: MemoryModel, stage: int, num_turns: int, *, num_idle_layers: int = 0) -> RingTraffic:
    """Of one stage; a single turn of K/V is a forward alone."""
    kv_bytes, gradient_bytes = _bytes_of_layer(memory)
    kv_bytes, gradient_bytes = num_turns * kv_bytes, (num_turns > 1) * gradient_bytes
    num_layers = memory.layers(stage) - num_idle_layers
    # A microbatch without rows leaves out the attention of the model's last layer, unless a router's losses read it.
    is_tail = stage == memory.num_stages - 1 and not memory.shape.is_moe and not num_idle_layers
    return RingTraffic(num_layers * kv_bytes, num_layers * gradient_bytes, is_tail * kv_bytes, is_tail * gradient_bytes)


def _bytes_of_layer(memory: MemoryModel) -> tuple[int, int]:
    """K/V, and their gradients, of one position in one layer, on all tensor-parallel ranks together."""
    shape = memory.shape
    kv_bytes = shape.kv_bytes_per_token(memory.element_bytes)
    gradient_bytes = shape.kv_gradient_bytes_per_token(memory.element_bytes)
    return kv_bytes // shape.num_layers, gradient_bytes // shape.num_layers


def _run_again(moves: MemoryPlan) -> Iterator[tuple[int, int, bool]]:
    """(stage, microbatch, whether only for the K/V that it writes) of each forward that is run once more."""
    for action in itertools.chain(*moves.before.values(), *moves.after.values()):
        if action.move is Move.RECOMPUTE:
            yield action.stage, action.target, True
    for (stage, m), policy in moves.activations.items():
        if policy is ActivationPolicy.RECOMPUTE:
            yield stage, m, False
