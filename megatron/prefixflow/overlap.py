"""Reduction of gradients while the last backwards still run (`--overlap-grad-reduce`).

Strategy:

1. No operation touches a model chunk's gradients after the chunk's last backward in the row (`last_backwards`). Several
   chunks of a rank end at different times.
2. Within that backward gradients become final from the output towards the embedding. Autograd accumulates a weight's
   gradient before it goes on, and reaches layer i through the gradient of its output only: the first parameter of layer i
   that receives a gradient says that everything behind it is final. That holds for parameters that receive none, too: the
   backward of a prefix leaves out the LM head and the last MLP, so ready counts would wait for ever.
3. A bucket starts when it and all buckets before it in `reduction_order` are final; what is left when the row has ended is
   started by `gradients.reduce_gradients`, also on a rank that has no microbatch.

Invariant: all ranks of a data-parallel group start the same buckets in the same order, whatever their rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.prefixflow.groups import Groups
from megatron.prefixflow.model import bare_model
from prefixflow.runtime.executor import Observer
from prefixflow.schedule.ops import Op
from prefixflow.schedule.table import last_backwards


@dataclass(frozen=True, slots=True)
class Reducible:
    """Buckets that are reduced by one call.

    chunk: model chunk of this rank. depth: smallest `parameter_depth` of its parameters, the last to become final.
    buckets: Megatron's bucket group.
    """

    chunk: int
    depth: int
    buckets: Any

    @property
    def overlaps(self) -> bool:
        return bool(self.buckets.ddp_config.overlap_grad_reduce)

    @property
    def has_started(self) -> bool:
        return self.buckets.grad_reduce_handle is not None

    def start(self) -> None:
        """Start the reduction; it runs beside what this rank does next."""
        self.buckets.start_grad_sync()


def reduction_order(model: Sequence[DistributedDataParallel]) -> tuple[Reducible, ...]:
    """All buckets of this rank's chunks as they become final: last chunk first, each from the head to the embedding."""
    found = [
        Reducible(number, min(depths[p] for p in group.params), group)
        for number, chunk in enumerate(model)
        for depths in [parameter_depths(bare_model(chunk))]
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    return tuple(sorted(found, key=lambda r: (-r.chunk, -r.depth)))


def parameter_depths(chunk: Any) -> dict[torch.nn.Parameter, int]:
    """Place of each parameter in a forward: 0 for the embedding, then the layers, then final norm and LM head."""
    num_layers = len(chunk.decoder.layers)
    depths = {}
    for name, parameter in chunk.named_parameters():
        if name.startswith("embedding."):
            depths[parameter] = 0
        elif name.startswith("decoder.layers."):
            depths[parameter] = 1 + int(name.split(".")[2])
        else:
            depths[parameter] = num_layers + 1
    return depths


class EarlyReduction:
    """Starts reductions during the operations of a step; `gradients.reduce_gradients` ends them."""

    def __init__(self, model: Sequence[DistributedDataParallel], groups: Groups) -> None:
        self._num_ranks = groups.pipeline.size()
        self._depths = [parameter_depths(bare_model(chunk)) for chunk in model]
        self._order = reduction_order(model)
        self._num_started = 0
        self._final_from: dict[int, int] = {}

    @classmethod
    def of(cls, model: Sequence[DistributedDataParallel], groups: Groups) -> EarlyReduction | None:
        """None where the gradient buffers were made without overlap."""
        reduction = cls(model, groups)
        return reduction if all(r.overlaps for r in reduction._order) else None

    def during(self, row: Sequence[Op]) -> Observer:
        """An observer of the operations of one step, which run `row`."""
        self._num_started, self._final_from = 0, {}
        last = last_backwards(row)

        @contextlib.contextmanager
        def observe(op: Op) -> Iterator[None]:
            if last.get(op.stage) != op:
                yield
                return
            chunk = op.stage // self._num_ranks
            with self._watching(chunk):
                yield
            self._advance(chunk, 0)

        return observe

    @contextlib.contextmanager
    def _watching(self, chunk: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for parameter, depth in self._depths[chunk].items():
                hook = partial(self._reached, chunk, depth)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            yield

    def _reached(self, chunk: int, depth: int, _: torch.Tensor) -> None:
        self._advance(chunk, depth + 1)

    def _advance(self, chunk: int, depth: int) -> None:
        """Gradients of `chunk` from `depth` on are final: start what may start."""
        assert depth <= self._final_from.get(chunk, depth), (
            f"chunk {chunk}: a gradient came after it was taken as final"
        )
        self._final_from[chunk] = depth
        while self._num_started < len(self._order):
            following = self._order[self._num_started]
            if following.chunk not in self._final_from or following.depth < self._final_from[following.chunk]:
                return
            following.start()
            self._num_started += 1
