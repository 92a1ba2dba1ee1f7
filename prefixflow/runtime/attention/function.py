"""Attention of one microbatch: slices joined by logsumexp, K/V of shared segments in a cache.

Steps, for q [T, n, d] and k, v [T, n_kv, d] of one layer
1. `Inject`, where later microbatches read segments of this one: its forward stores their K/V, its
   backward adds the gradients gK/gV that the readers left to those from this microbatch.
2. `SliceAttention`: one kernel call a slice. For slices a and b of the same queries

       w = sigmoid(lse_b - lse_a)
       out = out_a + w (out_b - out_a)
       lse = log(exp(lse_a) + exp(lse_b))

   in float32 (float64 for a float64 model) with one cast at the end. The backward calls each
   slice's kernel with the merged out and lse; dk and dv of cached keys go to the cache, the others
   stay in the graph.
3. `Root` instead of 2 in the last layer of a microbatch without loss rows: there the attention
   output is dead compute, but the layer's K and V still owe gradients, and a backward must find its
   way to `Inject`.

Under context parallelism q, k and v are of this rank's positions, and `GatheredAttention` is all three steps. K/V of
the microbatch are gathered (`prefixflow.runtime.context`) while the slices run that need none of other ranks: the causal
ones, whose keys are their queries' positions, and those of cached ancestors. In the backward dk and dv, partial sums of
this rank's queries, and gK/gV are reduced over ranks in the precision of gradient sums, while the slices of
cached ancestors run.

Under full recomputation the forward of a function runs twice, and grad mode is off inside it both
times: it cannot tell the first from the second, so the executor says which operation is running.
Nothing is stored in a recomputation, and ancestors are read from the cache again. So are, under context parallelism, the
segments that the microbatch wrote: only the rest is gathered again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache, accumulation_dtype, owned
from prefixflow.runtime.context import Pending, SplitMicrobatch


class Operation(enum.Enum):
    """What the executor is running; a backward includes the recomputation inside it, RECOMPUTE writes dropped blocks anew."""

    FORWARD = "F"
    BACKWARD = "B"
    RECOMPUTE = "R"
    FORWARD_ONLY = "FO"


@dataclass(slots=True, eq=False)
class AttentionContext:
    """What the attention of one microbatch needs beside q, k, v; shared by all layers.

    `writes` are (block id, token range) of the segments that later microbatches read. `operation`
    is set by the executor before each operation. `keys_only_layer` is the last layer of a
    microbatch without loss rows, whose attention output nothing reads.

    `split` under context parallelism: queries of all slices count among this rank's positions, keys of
    local slices and `writes` among those of the microbatch. Without it the two are the same. The keys of a causal
    slice are the positions of its queries. `reads_own`: a recomputation under it takes K/V of `writes` from the cache.

    Derived: `causal`, the causal slices by query; `full`, all others; `num_tokens`, the queries.
    """

    local: tuple[LocalSlice, ...]
    cached: tuple[CachedSlice, ...]
    writes: tuple[tuple[int, Range], ...]
    cache: KVCache
    kernel: AttentionKernel
    operation: Operation = Operation.FORWARD
    keys_only_layer: int | None = None
    split: SplitMicrobatch | None = None
    reads_own: bool = False
    causal: tuple[LocalSlice, ...] = field(init=False)
    full: tuple[LocalSlice | CachedSlice, ...] = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.causal = tuple(sorted((s for s in self.local if s.causal), key=lambda s: s.queries.start))
        self.full = (*self.cached, *(s for s in self.local if not s.causal))
        self.num_tokens = 0
        for piece in self.causal:
            fits = piece.queries == piece.keys if self.split is None else len(piece.queries) == len(piece.keys)
            assert fits, f"causal slice {piece}: queries and keys differ"
            assert piece.queries.start == self.num_tokens, (
                f"causal slices must cover every token once; token {self.num_tokens} is followed by {piece.queries}"
            )
            self.num_tokens = piece.queries.stop

    @property
    def is_one_causal_slice(self) -> bool:
        """True where one kernel call over all tokens is all there is."""
        return len(self.causal) == 1 and not self.full and self.split is None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float) -> Tensor:
        """`segment_attention` of this microbatch."""
        return segment_attention(q, k, v, self, layer, scale)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, layer: int, scale: float) -> Tensor:
    """Attention of one microbatch in one layer, differentiable: [T, n, d].

    q [T, n, d], k and v [T, n_kv, d], after RoPE; `scale` multiplies the scores. Raises ValueError
    when the tensors do not fit the slices, CacheError for an operation out of order.
    """
    check_shapes(q, k, v, context, layer)
    if context.split is not None:
        return GatheredAttention.apply(owned(q), k, v, context, layer, scale)
    q, k, v = owned(q), owned(k), owned(v)
    if context.writes:
        k, v = Inject.apply(k, v, context, layer)
    if layer == context.keys_only_layer:
        return Root.apply(q, k, v)
    return SliceAttention.apply(q, k, v, context, layer, scale)


class Inject(torch.autograd.Function):
    """Identity on (k, v): stores written segments going forward, adds gK/gV going back."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, context: AttentionContext, layer: int) -> tuple[Tensor, Tensor]:
        ctx.context, ctx.layer = context, layer
        _write(k, v, context, layer)
        return k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        taken = _take_gradients(ctx.context, ctx.layer)
        dk = _plus(dk, [(tokens, gk) for tokens, gk, _ in taken])
        dv = _plus(dv, [(tokens, gv) for tokens, _, gv in taken])
        return dk, dv, None, None


class SliceAttention(torch.autograd.Function):
    """All slices of a microbatch. Saves q, k, v, out, lse; backward reads cached keys again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        layer: int,
        scale: float,
    ) -> Tensor:
        out, lse = _forward(q, k, v, context, layer, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context, ctx.layer, ctx.scale = context, layer, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(dout, q, k, v, out, lse, ctx.context, ctx.layer, ctx.scale)
        return dq, dk, dv, None, None, None


class Root(torch.autograd.Function):
    """Zeros for an attention output that nothing reads; the backward still reaches q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shapes = (q.shape, k.shape, v.shape)
        return torch.zeros_like(q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(dout.new_zeros(shape) for shape in ctx.shapes)


class GatheredAttention(torch.autograd.Function):
    """`Inject`, then `SliceAttention` or `Root`, of a microbatch that context-parallel ranks share.

    q, k, v are of this rank's positions. Saves K/V of the microbatch.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, layer: int, scale: float
    ) -> Tensor:
        ctx.context, ctx.layer, ctx.scale = context, layer, scale
        pending = _start_gather(k, v, context, layer)
        if layer == context.keys_only_layer:
            k, v = pending.wait()
            ctx.kv_shape = k.shape
            out = torch.zeros_like(q)
        else:
            out, lse = _forward(q, k, v, context, layer, scale, pending)
            k, v = pending.wait()
            ctx.save_for_backward(q, k, v, out, lse)
        _write(k, v, context, layer)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        context, layer = ctx.context, ctx.layer
        dead = layer == context.keys_only_layer
        if dead:
            dq = torch.zeros_like(dout)
            dk, dv = dout.new_zeros(2, *ctx.kv_shape, dtype=accumulation_dtype(dout.dtype))
        else:
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = _local_backward(dout, q, k, v, out, lse, context, ctx.scale)
        for tokens, gk, gv in _take_gradients(context, layer):
            dk[tokens.slice] += gk
            dv[tokens.slice] += gv
        pending = context.split.start_reduce(dk, dv)
        if not dead:
            _cached_backward(dq, dout, q, out, lse, context, layer, ctx.scale)
        dk, dv = pending.wait()
        return dq.to(dout.dtype), dk.to(dout.dtype), dv.to(dout.dtype), None, None, None


def _start_gather(k: Tensor, v: Tensor, context: AttentionContext, layer: int) -> Pending:
    """K/V of the microbatch. What it wrote is not gathered again where it is in the cache until its backward is done."""
    assert context.split is not None
    if context.operation is not Operation.BACKWARD or not (context.reads_own and context.writes):
        return context.split.start_gather(k, v)
    known = [(tokens, context.cache.read(layer, (block,))) for block, tokens in context.writes]
    return context.split.start_completing(k, v, known)


def _write(k: Tensor, v: Tensor, context: AttentionContext, layer: int) -> None:
    """Store what later microbatches read, unless this is a recomputation inside a backward."""
    if context.operation is not Operation.BACKWARD:
        again = context.operation is Operation.RECOMPUTE
        store = context.cache.rewrite if again else context.cache.write
        for block, tokens in context.writes:
            store(layer, block, k[tokens.slice], v[tokens.slice])


def _take_gradients(context: AttentionContext, layer: int) -> list[tuple[Range, Tensor, Tensor]]:
    """(token range, gK, gV) of what later microbatches have read."""
    taken = []
    for block, tokens in context.writes:
        gradients = context.cache.take_gradient(layer, block)
        if gradients is not None:
            taken.append((tokens, *gradients))
    return taken


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    layer: int,
    scale: float,
    gathered: Pending | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse; `gathered`: keys of the local slices that are not causal, where k and v are of the queries alone."""
    kernel = context.kernel
    if context.is_one_causal_slice:
        return kernel.forward(q, k, v, True, scale)
    high = accumulation_dtype(q.dtype)
    out = torch.empty_like(q, dtype=high if context.full else q.dtype)
    lse = q.new_empty(q.shape[:2], dtype=high)
    for piece in context.causal:
        rows = piece.queries.slice
        out[rows], lse[rows] = kernel.forward(q[rows], k[rows], v[rows], True, scale)
    for part in context.full:
        rows = part.queries.slice
        if isinstance(part, CachedSlice):
            part_k, part_v = context.cache.read(layer, part.blocks)
        else:
            part_k, part_v = (x[part.keys.slice] for x in ((k, v) if gathered is None else gathered.wait()))
        part_out, part_lse = kernel.forward(q[rows], part_k, part_v, False, scale)
        merge_part(out[rows], lse[rows], part_out.to(high), part_lse)
    return out.to(q.dtype), lse


def merge_part(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a slice into out [T, n, d] and lse [T, n], in place."""
    out.lerp_(part_out, torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    context: AttentionContext,
    layer: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if context.is_one_causal_slice:
        dq, dk, dv = context.kernel.backward(dout, q, k, v, out, lse, True, scale)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    dq, dk, dv = _local_backward(dout, q, k, v, out, lse, context, scale)
    _cached_backward(dq, dout, q, out, lse, context, layer, scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _local_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    context: AttentionContext,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local slices, in the accumulation precision where more is to be added to them."""
    kernel = context.kernel
    high = accumulation_dtype(q.dtype)
    split = context.split is not None
    in_graph = split or any(isinstance(part, LocalSlice) for part in context.full)
    dq = torch.empty_like(q, dtype=high if context.full else q.dtype)
    # The causal slices reach every key, unless other ranks run some of them.
    new = torch.zeros_like if split else torch.empty_like
    dk, dv = (new(x, dtype=high if in_graph else x.dtype) for x in (k, v))
    for piece in context.causal:
        rows, keys = piece.queries.slice, piece.keys.slice
        dq[rows], dk[keys], dv[keys] = kernel.backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], True, scale
        )
    for part in context.full:
        if isinstance(part, LocalSlice):
            rows, keys = part.queries.slice, part.keys.slice
            part_dq, part_dk, part_dv = kernel.backward(
                dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], False, scale
            )
            dq[rows] += part_dq
            dk[keys] += part_dk
            dv[keys] += part_dv
    return dq, dk, dv


def _cached_backward(
    dq: Tensor,
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    context: AttentionContext,
    layer: int,
    scale: float,
) -> None:
    """Add to dq what comes from cached keys, and to the cache their gradients."""
    for part in context.cached:
        rows = part.queries.slice
        part_k, part_v = context.cache.read(layer, part.blocks)
        part_dq, part_dk, part_dv = context.kernel.backward(
            dout[rows], q[rows], part_k, part_v, out[rows], lse[rows], False, scale
        )
        dq[rows] += part_dq
        context.cache.add_gradient(layer, part.blocks, part_dk, part_dv)


def _plus(grad: Tensor, terms: list[tuple[Range, Tensor]]) -> Tensor:
    """`grad` plus terms over token ranges, summed in the accumulation precision and cast once."""
    if not terms:
        return grad
    total = grad.to(accumulation_dtype(grad.dtype), copy=True)
    for tokens, term in terms:
        total[tokens.slice] += term
    return total.to(grad.dtype)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, layer: int) -> None:
    """Raise ValueError where the tensors do not fit the slices."""
    num_tokens = context.num_tokens
    fits = q.shape[0] == k.shape[0] == num_tokens and k.shape == v.shape and q.dim() == k.dim() == 3
    if not fits or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"attention of layer {layer}: expected q [T, n, d] and k, v [T, n_kv, d] with "
            f"T = {num_tokens} (the tokens of the slices) and n a multiple of n_kv, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
