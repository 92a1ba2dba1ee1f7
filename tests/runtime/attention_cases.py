"""Trees of segments cut into microbatches, and their attention by brute force: each path whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range
from prefixflow.runtime.attention.function import AttentionContext, Operation, segment_attention
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache

PAD = -1
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Tree:
    """Segments in depth-first pre-order, and the consecutive groups that make microbatches."""

    parents: tuple[int | None, ...]
    lengths: tuple[int, ...]
    microbatches: tuple[tuple[int, ...], ...]
    num_padding: int = 0

    def path(self, segment: int) -> tuple[int, ...]:
        """Root first, ending in `segment`."""
        parent = self.parents[segment]
        return (*(self.path(parent) if parent is not None else ()), segment)

    @property
    def leaves(self) -> list[int]:
        return [s for s in range(len(self.parents)) if s not in self.parents]

    def contexts(self, cache: KVCache, kernel: AttentionKernel) -> list[AttentionContext]:
        return [self._context(group, cache, kernel) for group in self.microbatches]

    def tokens(self, group: tuple[int, ...]) -> dict[int, Range]:
        """Token range of each segment of a microbatch; padding, where there is any, comes last."""
        ranges, start = {}, 0
        for segment in group:
            ranges[segment] = Range(start, start + self.lengths[segment])
            start += self.lengths[segment]
        if self.num_padding:
            ranges[PAD] = Range(start, start + self.num_padding)
        return ranges

    def _context(self, group: tuple[int, ...], cache: KVCache, kernel: AttentionKernel) -> AttentionContext:
        ranges = self.tokens(group)
        local = [LocalSlice(r, r, causal=True) for r in ranges.values()]
        local += [
            LocalSlice(ranges[s], ranges[a], causal=False) for s in group for a in self.path(s)[:-1] if a in ranges
        ]
        cached: list[CachedSlice] = []
        for s in group:
            blocks = tuple(a for a in self.path(s)[:-1] if a not in ranges)
            if not blocks:
                continue
            last = cached[-1] if cached else None
            if last and last.blocks == blocks and last.queries.joins(ranges[s]):
                joined = Range(last.queries.start, ranges[s].stop)
                cached[-1] = CachedSlice(joined, blocks)
            else:
                cached.append(CachedSlice(ranges[s], blocks))
        read = {a for s in range(len(self.parents)) if s not in ranges for a in self.path(s)}
        writes = tuple((s, ranges[s]) for s in group if s in read)
        return AttentionContext(tuple(local), tuple(cached), writes, cache, kernel)


def random_tree(seed: int, num_segments: int = 9, max_length: int = 13) -> Tree:
    """Depth up to 4, lengths from 1, cut into microbatches at random; padding in every other one."""
    rng = random.Random(seed)
    parents: list[int | None] = [None]
    path = [0]
    for segment in range(1, num_segments):
        del path[rng.randint(1, min(len(path), 3)) :]
        parents.append(path[-1])
        path.append(segment)
    lengths = tuple(rng.choice((1, 2, rng.randint(3, max_length))) for _ in parents)
    groups: list[list[int]] = [[0]]
    for segment in range(1, num_segments):
        if rng.random() < 0.4:
            groups.append([])
        groups[-1].append(segment)
    return Tree(tuple(parents), lengths, tuple(map(tuple, groups)), num_padding=seed % 2 * 3)


@dataclass(frozen=True)
class Tensors:
    """q, k, v and dout of every segment; dout is the sum over the paths through it."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    dout: list[Tensor]

    def to(self, dtype: torch.dtype) -> Tensors:
        return Tensors(*([x.to(dtype) for x in xs] for xs in (self.q, self.k, self.v, self.dout)))


def random_tensors(tree: Tree, num_heads: int, num_kv_heads: int, head_size: int) -> Tensors:
    generator = torch.Generator().manual_seed(len(tree.parents) + sum(tree.lengths))

    def normal(num: int) -> list[Tensor]:
        return [torch.randn(t, num, head_size, generator=generator, dtype=torch.float64) for t in tree.lengths]

    # dout grows by segment, so that a gradient that lands in the wrong place is a large error.
    dout = [x * 3.0**i for i, x in enumerate(normal(num_heads))]
    return Tensors(normal(num_heads), normal(num_kv_heads), normal(num_kv_heads), dout)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one whole path, [T, n, d]: nothing of ours but the shapes."""
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
    scores = torch.einsum("tnd,snd->nts", q, k) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("nts,snd->tnd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def unshared(tree: Tree, tensors: Tensors, scale: float, attend: Attend = plain_attention) -> list[list[Tensor]]:
    """[out, dq, dk, dv] by segment: every path replayed whole, gradients summed by autograd."""
    leaves = [[x.clone().requires_grad_() for x in xs] for xs in (tensors.q, tensors.k, tensors.v)]
    outs: dict[int, Tensor] = {}
    num_paths = [sum(s in tree.path(leaf) for leaf in tree.leaves) for s in range(len(leaves[0]))]
    loss = torch.zeros((), dtype=tensors.q[0].dtype)
    for leaf in tree.leaves:
        path = tree.path(leaf)
        q, k, v = (torch.cat([xs[s] for s in path]) for xs in leaves)
        parts = attend(q, k, v, scale).split([tree.lengths[s] for s in path])
        for s, part in zip(path, parts, strict=True):
            outs[s] = part.detach()
            loss = loss + (part * tensors.dout[s] / num_paths[s]).sum()
    loss.backward()
    gradients = [[x.grad for x in xs] for xs in leaves]
    return [[outs[s] for s in range(len(num_paths))], *gradients]  # type: ignore[list-item]


def shared(tree: Tree, tensors: Tensors, scale: float, kernel: AttentionKernel, cache: KVCache) -> list[list[Tensor]]:
    """[out, dq, dk, dv] by segment through `segment_attention`, in a valid order of operations."""
    contexts = tree.contexts(cache, kernel)
    inputs: list[list[Tensor]] = []
    outs: list[Tensor] = []
    for group, context in zip(tree.microbatches, contexts, strict=True):
        q, k, v = (_joined(tree, group, xs).requires_grad_() for xs in (tensors.q, tensors.k, tensors.v))
        inputs.append([q, k, v])
        outs.append(segment_attention(q, k, v, context, 0, scale))
    for index in reversed(range(len(contexts))):
        contexts[index].operation = Operation.BACKWARD
        outs[index].backward(_joined(tree, tree.microbatches[index], tensors.dout))
        for block, _ in contexts[index].writes:
            cache.release(block)
            cache.close(block)
    cache.assert_empty()
    results = [outs, *([x[i].grad for x in inputs] for i in range(3))]
    return [_by_segment(tree, xs) for xs in results]  # type: ignore[arg-type]


def largest_error(got: list[list[Tensor]], expected: list[list[Tensor]]) -> float:
    """Largest over quantities and segments of ||got - expected|| / max(||expected||, 1).

    dq of a path of one token is exactly zero, which is why the denominator has a floor.
    """
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1.0))
        for xs, ys in zip(got, expected, strict=True)
        for a, b in zip(xs, ys, strict=True)
    )


def _joined(tree: Tree, group: tuple[int, ...], xs: list[Tensor]) -> Tensor:
    """The microbatch's tensor; padding is filled with large numbers, which must not leak."""
    padding = xs[0].new_full((tree.num_padding, *xs[0].shape[1:]), 1e3)
    return torch.cat([*(xs[s] for s in group), padding])


def _by_segment(tree: Tree, xs: list[Tensor]) -> list[Tensor]:
    found = {
        s: x[tokens.slice].detach()
        for group, x in zip(tree.microbatches, xs, strict=True)
        for s, tokens in tree.tokens(group).items()
    }
    return [found[s] for s in range(len(tree.parents))]
