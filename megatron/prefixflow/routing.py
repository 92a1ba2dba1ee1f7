"""The routers of a model chunk through a step: contexts set before each operation, routes and counts kept by microbatch."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.prefixflow.router import PlannedRouter, RoutingContext, router_loss_config
from prefixflow.forest.forest import Forest
from prefixflow.plan.batch import MicrobatchArrays
from prefixflow.plan.microbatch import Microbatch
from prefixflow.runtime.attention.function import Operation
from prefixflow.runtime.context import ContextParallel, SplitMicrobatch
from prefixflow.runtime.router_losses import RouterLosses
from prefixflow.trajectories import RouteShape


class RoutingReplay(enum.Enum):
    """Whose routes a forward takes; a recomputation always takes those of its forward.

    OFF: its own. RECORD: those of the first pass over the batch that was asked to keep them (`RouteStore`).
    ROLLOUT: those of the trajectories, and where they are unknown as RECORD.
    """

    OFF = "off"
    RECORD = "record"
    ROLLOUT = "rollout"


class RouteStore:
    """Routes of one batch from one pass over its plan to the next (old-policy pass, updates), keyed by chunk and microbatch.

    The first pass fills it, the later ones take what is in it.
    """

    def __init__(self) -> None:
        self._digest: str | None = None
        self._chunks: dict[int, dict[int, dict[int, Tensor]]] = {}

    def chunk(self, number: int, digest: str) -> dict[int, dict[int, Tensor]]:
        """Routes by microbatch and layer number of a model chunk; ValueError where they are of another plan."""
        self._digest = self._digest or digest
        if self._digest != digest:
            raise ValueError(
                f"The kept routes are of plan {self._digest}, but the pass runs plan {digest}: expected the same plan. "
                "Make a new RouteStore for every batch."
            )
        return self._chunks.setdefault(number, {})


@dataclass(frozen=True, slots=True)
class RouterTotals:
    """What the routers of this rank counted in one pass; plain sums over all ranks are those of the step.

    routes_replayed, routes_native: positions times layers whose experts were given or chosen; recomputation and padding
        not counted.
    load_balancing, z: the losses as they are added to the step's (`RouterLosses`); None where there is no such term.
    """

    routes_replayed: int = 0
    routes_native: int = 0
    load_balancing: float | None = None
    z: float | None = None


class StageRouting:
    """Sets contexts on the routers of one model chunk, and keeps what they leave.

    is_training: counts and losses are those of a training step; else nothing but routes is kept.
    kept: routes by microbatch and layer number from pass to pass; None keeps none.
    tp_group: tensor-parallel ranks, whose rows are parts of a microbatch under sequence parallelism.
    parallel: ranks that share each microbatch's positions; None where this one holds them all.
    """

    def __init__(
        self,
        model: Any,
        forest: Forest,
        *,
        is_training: bool,
        kept: dict[int, dict[int, Tensor]] | None = None,
        tp_group: Any,
        parallel: ContextParallel | None = None,
    ) -> None:
        self.config = model.config
        self._parallel = parallel
        self.routers = chunk_routers(model)
        self.losses: RouterLosses | None = None
        self.routes_replayed = 0
        self.routes_native = 0
        self._layers = tuple(router.layer_number for router in self.routers)
        self._places = {number: place for place, number in enumerate(moe_layer_numbers(self.config))}
        self._device = next(model.parameters()).device
        self._kept = kept
        self._tp_group = tp_group
        self._is_split = self.config.sequence_parallel and tp_group.size() > 1
        loss_config = router_loss_config(self.config)
        if is_training and loss_config.has_terms:
            self.losses = RouterLosses(loss_config, forest, len(self._layers), self._device)
        for router in self.routers:
            router.keep_buffers_float32()

    def context(
        self, microbatch: Microbatch, arrays: MicrobatchArrays, split: SplitMicrobatch | None = None
    ) -> RoutingContext:
        """The context of a microbatch, from its F to its B; counts its routes as replayed or native."""
        segment_of = self._local_rows(arrays.segment_of, split)
        is_padding = segment_of < 0
        kept = (self._kept or {}).get(microbatch.id, {})
        given = {} if arrays.routes is None or kept else self._given(self._local_rows(arrays.routes, split))
        for layer in self._layers:
            is_replayed = ~is_padding
            if layer not in kept:
                is_replayed &= (given[layer] >= 0).all(1) if layer in given else False
            self.routes_replayed += int(is_replayed.sum())
            self.routes_native += int((~is_padding & ~is_replayed).sum())
        return RoutingContext(
            segments=microbatch.segments,
            segment_of=self._tensor(np.where(is_padding, len(microbatch.segments), segment_of)),
            multiplicity=self._tensor(self._local_rows(arrays.multiplicity, split)),
            mean_weight=self._tensor(self._local_rows(arrays.mean_weight, split)),
            losses=self.losses,
            layers=self._layers,
            given={layer: self._tensor(routes) for layer, routes in given.items()},
            chosen=dict(kept),
        )

    @contextmanager
    def running(self, context: RoutingContext, operation: Operation) -> Iterator[None]:
        """Around an operation: its context on every router, and nowhere after it."""
        context.operation = operation
        context.calls.clear()
        for router in self.routers:
            router.context = context
        try:
            yield
        finally:
            for router in self.routers:
                router.context = None
        calls = tuple(context.calls[layer] for layer in self._layers)
        expected = (0, 1) if operation is Operation.BACKWARD else (1,)
        assert set(calls) <= set(expected), f"routers of layers {self._layers} were called {calls} times in {operation}"

    def finish_forward(self, m: int, context: RoutingContext) -> None:
        """Keep the counts and routes that F left."""
        if self._kept is not None:
            self._kept.setdefault(m, dict(context.chosen))
        if self.losses is None or not context.counts:
            return
        counts = torch.stack([context.counts[layer] for layer in self._layers], dim=1)
        if self._is_split:
            dist.all_reduce(counts, group=self._tp_group)
        if self._parallel is not None:
            dist.all_reduce(counts, group=self._parallel.group)
        self.losses.record(context.segments, counts)
        context.counts.clear()

    def _given(self, routes: np.ndarray) -> dict[int, np.ndarray]:
        return {layer: routes[:, self._places[layer]] for layer in self._layers}

    def _local_rows(self, array: np.ndarray, split: SplitMicrobatch | None) -> np.ndarray:
        """The rows of a microbatch [T, ...] that the routers of this rank see."""
        if split is not None:
            array = array[split.index]
        if not self._is_split:
            return array
        num_rows = len(array) // self._tp_group.size()
        return array[self._tp_group.rank() * num_rows :][:num_rows]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def router_totals(stages: Sequence[StageRouting]) -> RouterTotals:
    """Totals of the chunks of this rank."""
    losses = [stage.losses for stage in stages if stage.losses is not None]
    config = losses[0].config if losses else None
    return RouterTotals(
        routes_replayed=sum(stage.routes_replayed for stage in stages),
        routes_native=sum(stage.routes_native for stage in stages),
        load_balancing=sum(float(x.load_balancing_value) for x in losses) if config and config.load_balancing else None,
        z=sum(float(x.z_value) for x in losses) if config and config.z else None,
    )


def chunk_routers(model: Any) -> tuple[PlannedRouter, ...]:
    """The routers of a model chunk in layer order; ValueError where one is not ours."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        if not isinstance(router, PlannedRouter):
            raise ValueError(
                f"The router of layer {router.layer_number} is a {type(router).__name__}, expected a PlannedRouter: it would "
                "count a shared prefix once. Build the model with megatron.prefixflow.spec.block_spec, or call "
                "megatron.prefixflow.enable_prefix_reuse on it."
            )
    return tuple(sorted(routers, key=lambda router: router.layer_number))


def moe_layer_numbers(config: TransformerConfig) -> tuple[int, ...]:
    """Numbers (from 1, over all stages) of the layers with experts, in the order of a trajectory's routes."""
    if config.num_moe_experts is None:
        return ()
    every = config.moe_layer_freq
    has_experts = [i % every == 0 for i in range(config.num_layers)] if isinstance(every, int) else every
    return tuple(i + 1 for i, is_moe in enumerate(has_experts) if is_moe)


def route_shape(config: TransformerConfig) -> RouteShape:
    """What the routes of a rollout must look like."""
    assert config.num_moe_experts is not None
    return RouteShape(len(moe_layer_numbers(config)), config.moe_router_topk, config.num_moe_experts)
