"""Attention of context-parallel ranks against the same microbatches on one rank, both ways through the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from prefixflow.forest import build_forest
from prefixflow.plan.context import KVTraffic
from prefixflow.plan.microbatch import Microbatch, pack_microbatches
from prefixflow.runtime.attention.function import AttentionContext, Operation, segment_attention
from prefixflow.runtime.attention.kernels import EinsumKernel
from prefixflow.runtime.cache import KVCache, accumulation_dtype
from prefixflow.runtime.context import ContextParallel, Pending, SplitMicrobatch
from prefixflow.runtime.world import Worlds
from tests.plan.groups import batch_of

CP, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 2, 4, 2, 8
SHAPES = [(NUM_HEADS, HEAD_SIZE), (NUM_KV_HEADS, HEAD_SIZE), (NUM_KV_HEADS, HEAD_SIZE), (NUM_HEADS, HEAD_SIZE)]
PREFIX = 33
BATCH = batch_of(*([1] * PREFIX + [10 * i] + [2] * i for i in range(2, 9)))


class UnroundedKernel(EinsumKernel):
    """Outputs of slices are not rounded to half precision: splitting a slice over ranks then changes nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        high = accumulation_dtype(q.dtype)
        return super().forward(q.to(high), k.to(high), v.to(high), causal, scale)


@dataclass(frozen=True)
class Run:
    """[out, dq, dk, dv] of each microbatch, all positions or this rank's; bytes received, and as planned."""

    results: list[list[Tensor]]
    num_bytes: int
    planned_bytes: int


def all_ranks() -> ContextParallel:
    assert dist.group.WORLD is not None
    return ContextParallel(dist.group.WORLD)


def microbatches_of(max_tokens: int) -> tuple[Microbatch, ...]:
    return pack_microbatches(build_forest(BATCH), [0], max_tokens=max_tokens, multiple=2 * CP)


def attend(
    microbatches: tuple[Microbatch, ...], dtype: torch.dtype, parallel: ContextParallel | None, *, recompute: bool
) -> Run:
    """F of every microbatch, then B in reverse, with attention run again before each B if `recompute`."""
    cache = KVCache()
    contexts, inputs, outs = [], [], []
    for m in microbatches:
        split = None if parallel is None else parallel.split(m, torch.device("cpu"))
        context = AttentionContext(
            local=m.local if split is None else split.shard.local_slices(m.local),
            cached=m.cached if split is None else split.shard.cached_slices(m.cached),
            writes=tuple((s, m.span_of(s)) for s in m.writes),
            cache=cache,
            kernel=UnroundedKernel(),
            split=split,
            reads_own=split is not None and recompute,
        )
        generator = torch.Generator().manual_seed(m.id)
        index = slice(None) if split is None else torch.from_numpy(split.index)
        tensors = [torch.randn(m.num_physical_tokens, *s, generator=generator).to(dtype)[index] for s in SHAPES]
        q, k, v = (x.requires_grad_() for x in tensors[:3])
        contexts.append(context)
        inputs.append((q, k, v, tensors[3]))
        outs.append(segment_attention(q, k, v, context, 0, 0.3))
    for m, context, (q, k, v, dout), out in list(zip(microbatches, contexts, inputs, outs, strict=True))[::-1]:
        context.operation = Operation.BACKWARD
        if recompute:
            again = segment_attention(q, k, v, context, 0, 0.3)
            assert torch.equal(again, out)
            again.backward(dout)
        else:
            out.backward(dout)
        for block in m.writes:
            cache.release(block)
            cache.close(block)
    cache.assert_empty()
    results: Any = [[out.detach(), *(x.grad for x in xs[:3])] for out, xs in zip(outs, inputs, strict=True)]
    if parallel is None:
        return Run(results, 0, 0)
    num_elements = 2 * NUM_KV_HEADS * HEAD_SIZE
    kv_bytes = num_elements * dtype.itemsize
    traffic = KVTraffic(kv_bytes, kv_bytes if recompute else 0, num_elements * accumulation_dtype(dtype).itemsize)
    return Run(results, parallel.num_bytes, traffic.num_bytes(microbatches, CP))


def round_partial_sums() -> Any:
    """The fault: what a rank has for dK and dV rounded to bfloat16 before ranks are added up."""
    start = SplitMicrobatch.start_reduce

    def mutant(self: SplitMicrobatch, dk: Tensor, dv: Tensor) -> Pending:
        return start(self, dk.bfloat16().float(), dv.bfloat16().float())

    SplitMicrobatch.start_reduce = mutant  # type: ignore[method-assign]
    return start


def errors_in_float64(max_tokens: int, recompute: bool) -> tuple[float, int, int]:
    """Largest difference over positions, bytes received and as planned."""
    microbatches = microbatches_of(max_tokens)
    parallel = all_ranks()
    ours = attend(microbatches, torch.float64, parallel, recompute=recompute)
    whole = attend(microbatches, torch.float64, None, recompute=False)
    worst = 0.0
    for m, got, expected in zip(microbatches, ours.results, whole.results, strict=True):
        index = parallel.split(m, torch.device("cpu")).index
        worst = max(worst, *(float((a - b[index]).abs().max()) for a, b in zip(got, expected, strict=True)))
    return worst, ours.num_bytes, ours.planned_bytes


def share_rounded_once(rounds_twice: bool) -> float:
    """Of the elements of dK and dV in bfloat16 that are what one rank makes of them, which adds up in float32."""
    (m,) = microbatches_of(4096)
    parallel = all_ranks()
    start = round_partial_sums() if rounds_twice else SplitMicrobatch.start_reduce
    try:
        ours = attend((m,), torch.bfloat16, parallel, recompute=False).results[0]
    finally:
        SplitMicrobatch.start_reduce = start  # type: ignore[method-assign]
    whole = attend((m,), torch.bfloat16, None, recompute=False).results[0]
    index = parallel.split(m, torch.device("cpu")).index
    return float(torch.stack([a == b[index] for a, b in zip(ours[2:], whole[2:], strict=True)]).double().mean())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("max_tokens", [36, 64, 4096])
def test_ranks_find_what_one_rank_finds(worlds: Worlds, max_tokens: int, recompute: bool) -> None:
    microbatches = microbatches_of(max_tokens)
    assert (len(microbatches) > 1) == any(m.writes for m in microbatches) == (max_tokens < 4096)
    for error, num_bytes, planned in worlds[CP].run(errors_in_float64, max_tokens, recompute):
        assert error < 1e-12
        assert num_bytes == planned > 0


def test_partial_sums_of_ranks_are_rounded_once(worlds: Worlds) -> None:
    assert min(worlds[CP].run(share_rounded_once, False)) > 0.99
    assert max(worlds[CP].run(share_rounded_once, True)) < 0.9
