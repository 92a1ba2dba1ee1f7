"""Attention of one microbatch whose K/V stay sharded over the context-parallel ranks and are passed round.

Steps, on a rank with q [T/cp, n, d] and k, v [T/cp, n_kv, d] of its positions in one layer
1. `Inject` stores the rank's share of every segment that later microbatches read: cache, gK and gV hold shards.
2. `RingAttention`, forward: the shard (own K/V, then the rank's shares of the cached blocks that are read) goes round. In each
   hop the rank computes the slices of its queries and the shard at hand, while that shard goes on to the next rank
   and the one before it comes. Slices are merged as in `SliceAttention`.
3. Backward: the shards go round again, and behind them their gradients in the precision of gradient sums. Each rank adds
   its part to the gradients that arrive and passes them on, while it computes the next hop. After cp hops they are home: own
   ones go back into the graph, those of cached blocks to the cache.

Which messages there are, and how long they are, follows from the plan alone (`prefixflow.plan.ring`): a rank without a
query for a shard passes it on all the same. A message is never empty, since every rank holds positions of every microbatch.

Beside its own K/V, which rest in graph and cache, a rank holds at most two shards, the one at hand and the one that comes:
counted and asserted (`HeldShards`).

Recomputation runs step 2 again. In the last layer of a microbatch without rows `Root` takes its place and nothing moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.ring import Ring, block_shares
from prefixflow.runtime.attention.function import AttentionContext, Inject, Operation, Root, check_shapes, merge_part
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache, accumulation_dtype, owned
from prefixflow.runtime.context import ContextParallel, SplitMicrobatch

MOST_SHARDS = 2
_KV_TAG, _GRADIENT_TAG = 1, 2


@dataclass(slots=True)
class HeldShards:
    """How many shards of K/V this rank holds for the ring, now and at most."""

    num_held: int = 0
    peak: int = 0

    def add(self, shard: Tensor) -> Tensor:
        """Count `shard` until it is dropped by all who know it."""
        self.num_held += 1
        self.peak = max(self.peak, self.num_held)
        weakref.finalize(shard, self._dropped)
        assert self.num_held <= MOST_SHARDS, f"{self.num_held} shards of K/V held, expected at most {MOST_SHARDS}"
        return shard

    def _dropped(self) -> None:
        self.num_held -= 1


@dataclass(slots=True, eq=False, kw_only=True)
class RingContext(AttentionContext):
    """The context of a microbatch with sharded K/V.

    `local` are the causal slices of hop 0, which cover this rank's positions; `writes` count among these too. `cached` is
    empty: `ring` has all slices, by hop.
    """

    parallel: ContextParallel
    ring: Ring
    held: HeldShards

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float) -> Tensor:
        """q [T/cp, n, d], k and v [T/cp, n_kv, d] of this rank's positions -> [T/cp, n, d], differentiable."""
        check_shapes(q, k, v, self, layer)
        q, k, v = owned(q), owned(k), owned(v)
        if self.writes:
            k, v = Inject.apply(k, v, self, layer)
        if layer == self.keys_only_layer:
            return Root.apply(q, k, v)
        return RingAttention.apply(q, k, v, self, layer, scale)


class RingAttention(torch.autograd.Function):
    """All hops of a microbatch. Saves q, k, v, out, lse of this rank's positions; backward reads cached keys again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: RingContext, layer: int, scale: float) -> Tensor:
        out, lse = _forward(q, k, v, context, layer, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context, ctx.layer, ctx.scale = context, layer, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        context, layer = ctx.context, ctx.layer
        q, k, v, out, lse = ctx.saved_tensors
        dq, gradient = _backward(dout, q, k, v, out, lse, context, layer, ctx.scale)
        dk, dv = gradient
        num_own = len(k)
        if context.ring.blocks:
            context.cache.add_gradient(layer, context.ring.blocks, dk[num_own:], dv[num_own:])
        return dq, dk[:num_own].to(k.dtype), dv[:num_own].to(v.dtype), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, context: RingContext, layer: int, scale: float) -> tuple[Tensor, Tensor]:
    high = accumulation_dtype(q.dtype)
    out = torch.empty_like(q, dtype=high)
    lse = q.new_empty(q.shape[:2], dtype=high)
    shards = _Shards(context, _own_shard(k, v, context, layer))
    for hop in range(context.ring.size):
        shards.post(hop)
        _attend_hop(out, lse, q, shards.at_hand, context, hop, scale)
        shards.advance()
    return out.to(q.dtype), lse


def _attend_hop(
    out: Tensor, lse: Tensor, q: Tensor, shard: Tensor, context: RingContext, hop: int, scale: float
) -> None:
    k, v = shard
    for piece in context.ring.hops[hop]:
        rows, keys = piece.queries.slice, piece.keys.slice
        part_out, part_lse = context.kernel.forward(q[rows], k[keys], v[keys], piece.causal, scale)
        if piece.causal:
            # Hop 0 begins with these, and they cover every query once.
            out[rows], lse[rows] = part_out, part_lse
        else:
            merge_part(out[rows], lse[rows], part_out.to(out.dtype), part_lse)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    context: RingContext,
    layer: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dq [T/cp, n, d], and gradients of this rank's own shard [2, shard tokens, n_kv, d] from all ranks."""
    dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
    shards = _Shards(context, _own_shard(k, v, context, layer))
    gradients = _Gradients(context)
    for hop in range(context.ring.size):
        shards.post(hop)
        part = _hop_gradients(dq, dout, q, out, lse, shards.at_hand, context, hop, scale)
        shards.advance()
        gradients.pass_on(part, hop)
    return dq.to(q.dtype), gradients.take()


def _hop_gradients(
    dq: Tensor,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    shard: Tensor,
    context: RingContext,
    hop: int,
    scale: float,
) -> Tensor:
    """This rank's part of the gradients of `shard`, of the same shape; adds to dq."""
    k, v = shard
    gradient = torch.zeros_like(shard, dtype=dq.dtype)
    dk, dv = gradient
    for piece in context.ring.hops[hop]:
        rows, keys = piece.queries.slice, piece.keys.slice
        part_dq, part_dk, part_dv = context.kernel.backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], piece.causal, scale
        )
        dq[rows] += part_dq
        dk[keys] += part_dk
        dv[keys] += part_dv
    return gradient


def _own_shard(k: Tensor, v: Tensor, context: RingContext, layer: int) -> Tensor:
    """[2, shard tokens, n_kv, d]: K/V of this rank's positions and of its shares of the cached blocks."""
    parts = [(k, v), *(context.cache.read(layer, (block,)) for block in context.ring.blocks)]
    shard = k.new_empty(2, context.ring.shard_tokens[context.ring.rank], *k.shape[1:])
    for place, tensors in enumerate(zip(*parts, strict=True)):
        torch.cat(tensors, out=shard[place])
    return shard


class _Shards:
    """K/V on their way round: `at_hand` is the shard of this hop.

    Nobody else may keep a shard, or more than two are held.
    """

    def __init__(self, context: RingContext, own: Tensor) -> None:
        self.context = context
        self.at_hand = context.held.add(own)
        self._exchange: Exchange | None = None

    def post(self, hop: int) -> None:
        """Pass the shard at hand on and begin to receive the next, unless this is the last hop."""
        if hop + 1 == self.context.ring.size:
            return
        incoming = self.context.held.add(_empty_shard(self.context, hop + 1, self.at_hand, self.at_hand.dtype))
        self._exchange = Exchange(self.context.parallel, self.at_hand, incoming, _KV_TAG)

    def advance(self) -> None:
        """The next shard takes the place of the one at hand."""
        if self._exchange is not None:
            self.at_hand = self._exchange.wait()
            self._exchange = None


class _Gradients:
    """dK and dV on their way round, one hop behind their shard."""

    def __init__(self, context: RingContext) -> None:
        self.context = context
        self._exchange: Exchange | None = None

    def pass_on(self, part: Tensor, hop: int) -> None:
        """Add what has arrived for the shard of this hop to this rank's part, and pass it on."""
        if self._exchange is not None:
            part += self._exchange.wait()
        incoming = _empty_shard(self.context, hop + 1, part, part.dtype)
        self._exchange = Exchange(self.context.parallel, part, incoming, _GRADIENT_TAG)

    def take(self) -> Tensor:
        """Gradients of this rank's own shard, which have been everywhere."""
        assert self._exchange is not None
        return self._exchange.wait()


def _empty_shard(context: RingContext, hop: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    num_tokens = context.ring.shard_tokens[context.ring.source(hop)]
    return like.new_empty(2, num_tokens, *like.shape[2:], dtype=dtype)


class Exchange:
    """A message to the next context-parallel rank and one from the rank before, under way until `wait`.

    On NCCL both are one batch, so that they cannot wait for each other, and all ranks start the same ones in the same order;
    not yet run there. Gloo matches them by tag.
    """

    def __init__(self, parallel: ContextParallel, outgoing: Tensor, incoming: Tensor, tag: int) -> None:
        rank, size, group = parallel.rank, parallel.size, parallel.group
        self._outgoing: Tensor | None = outgoing
        self._incoming = incoming
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % size, tag=tag),
                dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size, tag=tag),
            ]
        )
        parallel.num_bytes += incoming.numel() * incoming.element_size()

    def wait(self) -> Tensor:
        """What has arrived; what was sent may go."""
        for work in self._works:
            work.wait()
        self._works = []
        self._outgoing = None
        return self._incoming


class RingStep:
    """What contexts of one step have in common: this rank's peers, the shares of all blocks, and the shards held."""

    def __init__(self, parallel: ContextParallel, microbatches: Sequence[Microbatch]) -> None:
        self.parallel = parallel
        self.held = HeldShards()
        self._shares = block_shares(microbatches, parallel.size)

    def context(
        self,
        microbatch: Microbatch,
        split: SplitMicrobatch,
        *,
        cache: KVCache,
        kernel: AttentionKernel,
        operation: Operation,
        keys_only_layer: int | None,
    ) -> RingContext:
        ring = Ring.of(microbatch, split.shards, self.parallel.rank, self._shares)
        return RingContext(
            local=tuple(piece for piece in ring.hops[0] if piece.causal),
            cached=(),
            writes=tuple((s, split.shard.own(microbatch.span_of(s))) for s in microbatch.writes),
            cache=cache,
            kernel=kernel,
            operation=operation,
            keys_only_layer=keys_only_layer,
            split=split,
            parallel=self.parallel,
            ring=ring,
            held=self.held,
        )
