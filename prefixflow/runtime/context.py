"""Context parallelism at run time: K/V of a microbatch gathered once, gradients reduced once, rows of the head joined.

Shapes: T positions of the microbatch, T/cp of them on each rank (`prefixflow.plan.context`).

Every collective here is called by all ranks of the group in the same order: what is moved follows from the plan alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefixflow.plan.context import ContextShard, context_shards
from prefixflow.plan.microbatch import Microbatch
from prefixflow.runtime.cache import accumulation_dtype


class ContextParallel:
    """The context-parallel ranks of this rank.

    num_bytes (attribute): of K/V and their gradients that this rank has received, since it was last set to 0.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.num_bytes = 0

    def split(self, microbatch: Microbatch, device: torch.device) -> SplitMicrobatch:
        return SplitMicrobatch.of(self, microbatch, device)

    def gather(self, x: Tensor) -> Tensor:
        """[size * n, ...]: `x` [n, ...] of all ranks in rank order."""
        x = x.contiguous()
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x, group=self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[n, ...]: this rank's part of the sum of `x` [size * n, ...] over all ranks."""
        x = x.contiguous()
        reduced = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(reduced, x, group=self.group)
        return reduced

    def gather_rows(self, values: Tensor, owners: np.ndarray) -> Tensor:
        """[R, c]: rows of all ranks, `values` [R_own, c] being this rank's in order; owners [R]: rank of each row."""
        counts = np.bincount(owners, minlength=self.size)
        longest = int(counts.max())
        padded = values.new_zeros(longest, values.shape[1])
        padded[: len(values)] = values
        place = np.empty(len(owners), np.int64)
        for rank in range(self.size):
            place[owners == rank] = rank * longest + np.arange(counts[rank])
        return self.gather(padded).index_select(0, torch.from_numpy(place).to(values.device))


@dataclass(frozen=True, slots=True, eq=False)
class SplitMicrobatch:
    """A microbatch over the ranks of `parallel`.

    shards: by rank; index [T/cp]: place in the microbatch of each position of this rank.
    owner [T], place [T]: rank that holds each position of the microbatch, and where among its own.
    rank_order [T]: positions of the microbatch, those of rank 0 first; flat_order [T]: the inverse.
    """

    parallel: ContextParallel
    shards: Sequence[ContextShard]
    index: np.ndarray
    owner: np.ndarray
    place: np.ndarray
    rank_order: Tensor
    flat_order: Tensor

    @classmethod
    def of(cls, parallel: ContextParallel, microbatch: Microbatch, device: torch.device) -> SplitMicrobatch:
        shards = context_shards(microbatch, parallel.size)
        order = np.concatenate([shard.index for shard in shards])
        flat_order = np.argsort(order)
        owner, place = np.divmod(flat_order, len(order) // parallel.size)
        return cls(
            parallel=parallel,
            shards=shards,
            index=shards[parallel.rank].index,
            owner=owner,
            place=place,
            rank_order=torch.from_numpy(order).to(device),
            flat_order=torch.from_numpy(flat_order).to(device),
        )

    @property
    def shard(self) -> ContextShard:
        """This rank's."""
        return self.shards[self.parallel.rank]

    def own_rows(self, row_index: np.ndarray) -> np.ndarray:
        """Numbers of the rows at this rank's positions; row_index [R]: place of each row in the microbatch."""
        return np.flatnonzero(self.owner[row_index] == self.parallel.rank)

    def gather_rows(
        self, row_index: np.ndarray, logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of all rows [R] from those of this rank's, in the microbatch's order."""
        columns = [logprobs] if entropy is None else [logprobs, entropy]
        joined = self.parallel.gather_rows(torch.stack(columns, dim=1), self.owner[row_index])
        return joined[:, 0], None if entropy is None else joined[:, 1]

    def gather_keys_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [T, n_kv, d] of the microbatch from those of this rank's positions [T/cp, n_kv, d], differentiable."""
        joined = GatherKeysValues.apply(torch.cat([k, v], dim=-1), self)
        k, v = joined.chunk(2, dim=-1)
        return k.contiguous(), v.contiguous()


class GatherKeysValues(torch.autograd.Function):
    """[T/cp, n_kv, 2 d] of this rank to [T, n_kv, 2 d] in the order of the microbatch.

    Each rank has a part of the gradient of every position, from its own queries: the backward sums them in the precision of
    gradient sums and leaves each rank the gradient of its positions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: SplitMicrobatch) -> Tensor:
        ctx.split = split
        gathered = split.parallel.gather(x)
        split.parallel.num_bytes += _num_received(gathered, split.parallel.size)
        return gathered.index_select(0, split.flat_order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        split: SplitMicrobatch = ctx.split
        parts = grad.index_select(0, split.rank_order).to(accumulation_dtype(grad.dtype))
        reduced = split.parallel.reduce_scatter(parts)
        split.parallel.num_bytes += _num_received(parts, split.parallel.size)
        return reduced.to(grad.dtype), None


def _num_received(whole: Tensor, size: int) -> int:
    """Bytes of the other ranks' parts of `whole`."""
    return whole.numel() // size * (size - 1) * whole.element_size()
