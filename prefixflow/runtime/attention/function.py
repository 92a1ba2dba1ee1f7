"""Attention of one microbatch: slices joined by logsumexp, K/V of shared segments in a cache.

Steps, for q [T, n, d] and k, v [T, n_kv, d] of one layer
0. Under context parallelism q, k and v are of this rank's positions: K/V of the whole microbatch are gathered
   first (`prefixflow.runtime.context`). Everything below then has the queries of this rank and the keys of the
   microbatch, and gK/gV are partial sums, which the gather's backward adds up over ranks.
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

Under full recomputation the forward of a function runs twice, and grad mode is off inside it both
times: it cannot tell the first from the second, so the executor says which operation is running.
Nothing is stored in a recomputation, and ancestors are read from the cache again.
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
from prefixflow.runtime.cache import KVCache, accumulation_dtype, owns_memory
from prefixflow.runtime.context import SplitMicrobatch


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
    local slices and `writes` among those of the microbatch. Without it the two are the same.

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
    causal: tuple[LocalSlice, ...] = field(init=False)
    full: tuple[LocalSlice | CachedSlice, ...] = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.causal = tuple(sorted((s for s in self.local if s.causal), key=lambda s: s.queries.start))
        self.full = (*(s for s in self.local if not s.causal), *self.cached)
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
    _check_shapes(q, k, v, context, layer)
    # A view of the fused projection, kept for backward, would keep the whole projection alive.
    q, k, v = (x if owns_memory(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    if context.split is not None:
        k, v = context.split.gather_keys_values(k, v)
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
        if context.operation is not Operation.BACKWARD:
            again = context.operation is Operation.RECOMPUTE
            store = context.cache.rewrite if again else context.cache.write
            for block, tokens in context.writes:
                store(layer, block, k[tokens.slice], v[tokens.slice])
        return k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        taken = []
        for block, tokens in ctx.context.writes:
            gradients = ctx.context.cache.take_gradient(ctx.layer, block)
            if gradients is not None:
                taken.append((tokens, *gradients))
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


def _forward(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = context.kernel
    if context.is_one_causal_slice:
        return kernel.forward(q, k, v, True, scale)
    high = accumulation_dtype(q.dtype)
    out = torch.empty_like(q, dtype=high if context.full else q.dtype)
    lse = q.new_empty(q.shape[:2], dtype=high)
    for piece in context.causal:
        rows, keys = piece.queries.slice, piece.keys.slice
        out[rows], lse[rows] = kernel.forward(q[rows], k[keys], v[keys], True, scale)
    for part in context.full:
        rows = part.queries.slice
        part_k, part_v = _keys_values(part, k, v, context.cache, layer)
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
    kernel = context.kernel
    if context.is_one_causal_slice:
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, True, scale)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    high = accumulation_dtype(q.dtype)
    in_graph = any(isinstance(part, LocalSlice) for part in context.full)
    dq = torch.empty_like(q, dtype=high if context.full else q.dtype)
    # The causal slices reach every key, unless other ranks run some of them.
    new = torch.empty_like if context.split is None else torch.zeros_like
    dk, dv = (new(x, dtype=high if in_graph else x.dtype) for x in (k, v))
    for piece in context.causal:
        rows, keys = piece.queries.slice, piece.keys.slice
        dq[rows], dk[keys], dv[keys] = kernel.backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], True, scale
        )
    for part in context.full:
        rows = part.queries.slice
        part_k, part_v = _keys_values(part, k, v, context.cache, layer)
        part_dq, part_dk, part_dv = kernel.backward(
            dout[rows], q[rows], part_k, part_v, out[rows], lse[rows], False, scale
        )
        dq[rows] += part_dq
        if isinstance(part, LocalSlice):
            dk[part.keys.slice] += part_dk
            dv[part.keys.slice] += part_dv
        else:
            context.cache.add_gradient(layer, part.blocks, part_dk, part_dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _keys_values(
    part: LocalSlice | CachedSlice, k: Tensor, v: Tensor, cache: KVCache, layer: int
) -> tuple[Tensor, Tensor]:
    if isinstance(part, CachedSlice):
        return cache.read(layer, part.blocks)
    return k[part.keys.slice], v[part.keys.slice]


def _plus(grad: Tensor, terms: list[tuple[Range, Tensor]]) -> Tensor:
    """`grad` plus terms over token ranges, summed in the accumulation precision and cast once."""
    if not terms:
        return grad
    total = grad.to(accumulation_dtype(grad.dtype), copy=True)
    for tokens, term in terms:
        total[tokens.slice] += term
    return total.to(grad.dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, layer: int) -> None:
    num_tokens = context.num_tokens
    fits = q.shape[0] == k.shape[0] == num_tokens and k.shape == v.shape and q.dim() == k.dim() == 3
    if not fits or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"attention of layer {layer}: expected q [T, n, d] and k, v [T, n_kv, d] with "
            f"T = {num_tokens} (the tokens of the slices) and n a multiple of n_kv, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
