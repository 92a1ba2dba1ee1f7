"""Context parallelism at run time: K/V of a microbatch gathered once, gradients reduced once, rows of the head joined.

Shapes: T positions of the microbatch, T/cp of them on each rank (`prefixflow.plan.context`).

Every collective here is called by all ranks of the group in the same order: what is moved follows from the plan alone.
Those of K/V are started, and waited for where their result is needed, so that what does not need it runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from prefixflow.plan.context import ContextShard, context_shards
from prefixflow.plan.microbatch import Microbatch
from prefixflow.ranges import Range

KeysValues = tuple[Tensor, Tensor]


class Pending:
    """K and V, or their gradients, of a collective under way."""

    def __init__(self, work: dist.Work | None, source: Tensor | None, finish: Callable[[], KeysValues]) -> None:
        """source: what the collective reads, kept until it is done. finish: makes the result after it."""
        self._work = work
        self._source = source
        self._finish = finish
        self._result: KeysValues | None = None

    def wait(self) -> KeysValues:
        """The result, the same at every call."""
        if self._result is None:
            if self._work is not None:
                self._work.wait()
            self._result = self._finish()
            self._work = self._source = None
        return self._result


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
        gathered, work = self.start_gather(x.contiguous())
        work.wait()
        return gathered

    def start_gather(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """As `gather`, for a contiguous `x`; the result is there once the work has been waited for."""
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        return gathered, dist.all_gather_into_tensor(gathered, x, group=self.group, async_op=True)

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """[n, ...]: this rank's part of the sum of a contiguous `x` [size * n, ...] over all ranks, likewise."""
        reduced = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return reduced, dist.reduce_scatter_tensor(reduced, x, group=self.group, async_op=True)


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
        send, place = self._padded(torch.stack(columns, dim=1), self.owner[row_index])
        joined = self.parallel.gather(send).index_select(0, place)
        return joined[:, 0], None if entropy is None else joined[:, 1]

    def start_gather(self, k: Tensor, v: Tensor) -> Pending:
        """K and V [T, n_kv, d] of the microbatch from those of this rank's positions [T/cp, n_kv, d]."""
        return self._start(torch.cat([k, v], dim=-1), self.flat_order)

    def start_completing(self, k: Tensor, v: Tensor, known: Sequence[tuple[Range, KeysValues]]) -> Pending:
        """As `start_gather`, where K and V of the ranges `known` are at hand: the others are moved, in equal parts."""
        unknown = np.ones(len(self.owner), bool)
        for tokens, _ in known:
            unknown[tokens.slice] = False
        positions = np.flatnonzero(unknown)
        missing = None
        if len(positions):
            own = positions[self.owner[positions] == self.parallel.rank]
            chosen = torch.from_numpy(self.place[own]).to(k.device)
            send, place = self._padded(torch.cat([k, v], dim=-1)[chosen], self.owner[positions])
            missing = self._start(send, place)

        def finish() -> KeysValues:
            if missing is None and len(known) == 1:
                return known[0][1]
            joined = k.new_empty(2, len(self.owner), *k.shape[1:])
            for tokens, keys_values in known:
                for whole, part in zip(joined, keys_values, strict=True):
                    whole[tokens.slice] = part
            if missing is not None:
                index = torch.from_numpy(positions).to(k.device)
                for whole, part in zip(joined, missing.wait(), strict=True):
                    whole.index_copy_(0, index, part)
            return joined[0], joined[1]

        return Pending(None, None, finish)

    def start_reduce(self, dk: Tensor, dv: Tensor) -> Pending:
        """Gradients of this rank's positions [T/cp, n_kv, d], summed over what all ranks have for them: dk, dv
        [T, n_kv, d], in the precision of gradient sums."""
        parts = torch.cat([dk, dv], dim=-1).index_select(0, self.rank_order)
        reduced, work = self.parallel.start_reduce_scatter(parts)
        self._count(parts)
        return Pending(work, parts, lambda: _halves(reduced))

    def _start(self, send: Tensor, order: Tensor) -> Pending:
        """Gather `send` [n, n_kv, 2 d]; the result takes its rows in `order`."""
        gathered, work = self.parallel.start_gather(send)
        self._count(gathered)
        return Pending(work, send, lambda: _halves(gathered, order))

    def _padded(self, values: Tensor, owners: np.ndarray) -> tuple[Tensor, Tensor]:
        """This rank's `values` [R_own, ...] with zeros up to the longest rank's, and where each of the R rows then
        stands in what is gathered; owners [R]: rank of each row."""
        size = self.parallel.size
        counts = np.bincount(owners, minlength=size)
        longest = int(counts.max())
        padded = values.new_zeros(longest, *values.shape[1:])
        padded[: len(values)] = values
        place = np.empty(len(owners), np.int64)
        for rank in range(size):
            place[owners == rank] = rank * longest + np.arange(counts[rank])
        return padded, torch.from_numpy(place).to(values.device)

    def _count(self, whole: Tensor) -> None:
        """Bytes of the other ranks' parts of `whole`."""
        size = self.parallel.size
        self.parallel.num_bytes += whole.numel() // size * (size - 1) * whole.element_size()


def _halves(joined: Tensor, order: Tensor | None = None) -> KeysValues:
    """K and V of [n, n_kv, 2 d], contiguous, their rows in `order`."""
    k, v = joined.chunk(2, dim=-1)
    if order is None:
        return k.contiguous(), v.contiguous()
    return k.index_select(0, order), v.index_select(0, order)
