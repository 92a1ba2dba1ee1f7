"""`forward_backward`: what Megatron's `get_forward_backward_func()` returns, with prefixes computed once.

Strategy:

1. A framework's microbatches become loss calls over sequences (`doors`); nothing runs on the model yet.
2. All sequences of the step are planned at once, on the data-parallel rank that the framework has put them on. Ranks that exchange
   tokens plan together.
3. Where no rank shares anything, the original schedule runs on the very same microbatches. All ranks decide alike.
4. Else the plan runs, the framework's loss functions are called once each (`loss_contract`), and `finalize_model_grads_func` once.

Invariants:

1. Gradients, the returned list and the token count given to `finalize_model_grads_func` are those of the original schedule.
2. Every rank takes part in the same collectives whatever its sequences, and in the same order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.prefixflow.adapter import MicrobatchAdapter, SequenceInput
from megatron.prefixflow.attach import PrefixReuseHandle, handle_of
from megatron.prefixflow.doors import Chunks, Door, open_door
from megatron.prefixflow.groups import Groups, process_group_collection
from megatron.prefixflow.loss_contract import LossContract
from megatron.prefixflow.recorded_routes import recorded_routes
from megatron.prefixflow.routing import RouteStore, RoutingReplay
from megatron.prefixflow.verify import Snapshot, compare_gradients, copied, summed_gradients
from prefixflow.plan.plan import Plan
from prefixflow.runtime.called import CalledObjective
from prefixflow.trajectories.types import Trajectory

_LOGGER = logging.getLogger(__name__)
_Made = TypeVar("_Made")
_GROUP = "step"
"""Sharing is found by tokens: all sequences of a step may share."""


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
    adapter: MicrobatchAdapter | None = None,
) -> list[Any]:
    """Run forward and backward of a step's microbatches, as Megatron's `get_forward_backward_func()(...)` does.

    All arguments but the last, and the result, are those of Megatron's schedules (tried: 0.16.1). A model without
    `enable_prefix_reuse` is run by them.

    adapter: reads the items of `data_iterator` and calls the loss; `forward_step_func` is then used only where nothing is shared.
        None: `forward_step_func` is called with a stand-in for the model, must call it once with labels, and must return its
        output as it is (`megatron.prefixflow.recording`).

    Returns what the loss functions returned last, on the last pipeline stage; elsewhere [].

    Raises ValueError for what prefix reuse does not have, with the way out, and under `require_sharing` where a training step
    shares nothing.
    """
    schedule = Schedule(
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        force_all_reduce=force_all_reduce,
    )
    handle = handle_of(model)
    if handle is None or handle.gave_up or handle.settings.prefix_reuse == "off":
        if handle is not None:
            handle.metrics = _metrics(Sums(), fallback=True)
        return schedule.original(forward_step_func, data_iterator)
    schedule.check(handle.groups)
    door = all_or_none(
        lambda: open_door(
            adapter,
            forward_step_func,
            Chunks.of(model, data_iterator),
            num_microbatches,
            handle.groups,
            handle.runner.device,
            training=not forward_only,
        ),
        handle,
    )
    return _Step(handle, schedule, door).run()


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The arguments of Megatron's schedules but for data and forward step."""

    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    adjust_tensor_shapes_fn: Callable[..., Any] | None
    p2p_communicator: Any
    pg_collection: Any
    force_all_reduce: bool

    def original(self, forward_step_func: Callable[..., Any], data_iterator: Any) -> list[Any]:
        """Run Megatron's own schedule."""
        keywords = {field.name: getattr(self, field.name) for field in fields(self)}
        return get_forward_backward_func()(forward_step_func=forward_step_func, data_iterator=data_iterator, **keywords)

    @property
    def models(self) -> list[Any]:
        return list(self.model) if isinstance(self.model, list) else [self.model]

    def check(self, groups: Groups) -> None:
        """ValueError where the arguments ask for what prefix reuse does not have."""
        if self.adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "forward_backward: adjust_tensor_shapes_fn has no place with prefix reuse, whose messages have shapes of their own. "
                "Leave it out, or call Megatron's schedule."
            )
        if self.collect_non_loss_data and not self.forward_only:
            raise ValueError(
                "forward_backward: collect_non_loss_data needs forward_only, since there is no loss to train on."
            )
        given = self.pg_collection
        for name, ours in (("tp", groups.tensor), ("pp", groups.pipeline), ("cp", groups.context)):
            theirs = getattr(given, name, None)
            if theirs is not None and dist.get_process_group_ranks(theirs) != dist.get_process_group_ranks(ours):
                raise ValueError(
                    f"forward_backward: pg_collection.{name} is not the group of megatron.core.parallel_state that prefix reuse was "
                    "enabled with. Initialise parallel_state with the groups of this model, then enable prefix reuse."
                )


@dataclass(frozen=True, slots=True)
class Sums:
    """Over data-parallel ranks. num_sharing: ranks with a shared prefix. Tokens are positions, costs are in FLOPs."""

    num_sharing: float = 0.0
    logical_tokens: float = 0.0
    computed_tokens: float = 0.0
    baseline_flops: float = 0.0
    reuse_flops: float = 0.0

    @classmethod
    def of(cls, plan: Plan, groups: Groups, device: torch.device) -> Sums:
        """Collective over the data-parallel ranks."""
        forest = plan.forest
        own = (
            forest.num_shared_segments > 0,
            forest.logical_tokens,
            forest.computed_tokens,
            plan.baseline_flops,
            plan.reuse_flops,
        )
        sums = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(sums, group=groups.data_parallel)
        return cls(*sums.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of a step on the ranks that plan together.

    placement, joint: data-parallel rank and loss call of each trajectory. calls: numbers of this rank's loss calls, in order.
    """

    trajectories: tuple[Trajectory, ...]
    placement: tuple[int, ...]
    joint: tuple[int, ...]
    calls: tuple[int, ...]
    num_tokens: int
    has_routes: bool


class _Step:
    def __init__(self, handle: PrefixReuseHandle, schedule: Schedule, door: Door) -> None:
        self._handle = handle
        self._schedule = schedule
        self._door = door
        self._runner = handle.runner
        self._training = not schedule.forward_only
        self._config = handle.chunks[0].config

    def run(self) -> list[Any]:
        batch, plan = all_or_none(self._planned, self._handle)
        sums = Sums.of(plan, self._handle.groups, self._runner.device)
        if not sums.num_sharing:
            return self._without_sharing(batch)
        self._handle.metrics = _metrics(sums, fallback=False)
        with _timed(self._config):
            return self._train(plan, batch) if self._training else self._score(plan, batch)

    def _planned(self) -> tuple[Batch, Plan]:
        batch = gather_batch(self._door, self._handle)
        recording = RoutingReplay.OFF if self._door.keep_routes is None else RoutingReplay.RECORD
        self._runner.routing_replay = RoutingReplay.ROLLOUT if batch.has_routes else recording
        plan = self._runner.plan_calls(
            batch.trajectories,
            self._handle.plan_config(batch.num_tokens, with_routes=batch.has_routes),
            placement=batch.placement,
            joint=batch.joint,
            group=self._handle.planning_group,
        )
        return batch, plan

    def _without_sharing(self, batch: Batch) -> list[Any]:
        if self._handle.settings.require_sharing and self._training:
            raise ValueError(
                f"Nothing is shared in this step ({len(batch.trajectories)} sequences on this data-parallel rank), and require_sharing is "
                "on. Put the samples of one prompt on one data-parallel rank and in one step (shuffle groups, not samples), or enable "
                "prefix reuse without require_sharing."
            )
        self._handle.metrics = _metrics(Sums(), fallback=True)
        return self._schedule.original(*self._door.again())

    def _score(self, plan: Plan, batch: Batch) -> list[Any]:
        with self._handle.step(training=False, model=self._schedule.models):
            return self._run(plan, batch).results

    def _train(self, plan: Plan, batch: Batch) -> list[Any]:
        handle, schedule = self._handle, self._schedule
        with handle.step(force_all_reduce=schedule.force_all_reduce, model=schedule.models):
            if handle.num_verified < handle.settings.verify_steps:
                losses, results = self._verified(plan, batch)
            else:
                losses = self._run(plan, batch)
                results = losses.results
        if self._config.finalize_model_grads_func is not None:
            self._config.finalize_model_grads_func(
                schedule.models,
                losses.num_tokens if self._config.calculate_per_token_loss else None,
                pg_collection=schedule.pg_collection or process_group_collection(),
                force_all_reduce=schedule.force_all_reduce,
            )
        return results

    def _run(self, plan: Plan, batch: Batch) -> LossContract:
        groups, runner = self._handle.groups, self._runner
        losses = LossContract(
            self._door.loss_calls,
            self._config,
            num_microbatches=self._schedule.num_microbatches,
            context_size=groups.context.size(),
            device=runner.device,
            training=self._training,
            collect_non_loss_data=self._schedule.collect_non_loss_data,
        )
        place_of = {number: place for place, number in enumerate(batch.calls)}
        own = [i for i, call in enumerate(batch.joint) if call in place_of]
        objective = CalledObjective(
            batch.trajectories,
            own,
            batch.joint,
            lambda number, logprobs, entropies: losses(place_of[number], logprobs, entropies),
            vocab_size=runner.vocab_size,
            dtype=runner.dtype,
            device=runner.device,
            needs_entropy=self._door.needs_entropy,
            training=self._training,
        )
        store = None if self._door.keep_routes is None else RouteStore()
        runner.run(plan, batch.trajectories, objective, training=self._training, routes=store)
        if store is not None and self._door.keep_routes is not None:
            self._door.keep_routes([[chunk[i] for i in own] for chunk in recorded_routes(runner, plan, own, store)])
        if runner.has_head:
            losses.call_those_without_sequences()
        return losses

    def _verified(self, plan: Plan, batch: Batch) -> tuple[LossContract, list[Any]]:
        """Run the step both ways from the same gradients; keeps ours, or the original's where they differ and that is wanted."""
        handle = self._handle
        # Gradients are compared before any of them is reduced.
        self._runner.reduction = None
        before = Snapshot(handle.chunks)
        with _unfinished(self._config):
            results = self._schedule.original(*self._door.again())
        original = Snapshot(handle.chunks)
        expected = copied(summed_gradients(handle.chunks, handle.groups))
        before.restore()
        losses = self._run(plan, batch)
        errors = compare_gradients(summed_gradients(handle.chunks, handle.groups), expected)
        handle.metrics["prefixflow/gradient_error"] = errors.judged(self._runner.parameter_dtype)
        # Megatron's own cross entropy is float32, also in a float64 model.
        dtype = self._runner.parameter_dtype
        problem = errors.problem(
            torch.float32 if dtype == torch.float64 else dtype, has_experts=bool(self._config.num_moe_experts)
        )
        if problem is None:
            handle.num_verified += 1
            return losses, losses.results
        original.restore()
        story = f"verify_steps: step {handle.num_verified + 1} with prefix reuse is not the original one: {problem}."
        if handle.settings.on_mismatch == "stop":
            raise RuntimeError(
                f"{story} The gradients are left as the original schedule made them, not reduced. Report it with the model's "
                "configuration; on_mismatch='fallback' trains on without prefix reuse."
            )
        _LOGGER.warning("%s Training goes on without prefix reuse.", story)
        handle.gave_up = True
        error = handle.metrics["prefixflow/gradient_error"]
        handle.metrics = {**_metrics(Sums(), fallback=True), "prefixflow/gradient_error": error}
        return losses, results


def all_or_none(make: Callable[[], _Made], handle: PrefixReuseHandle) -> _Made:
    """What `make` returns; what one data-parallel rank fails at, all raise (collective over them)."""
    groups, failure, made = handle.groups, None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    if groups.data_parallel.size() > 1:
        failed = torch.tensor(float(failure is not None), device=handle.runner.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=groups.data_parallel)
        if failed and failure is None:
            failure = RuntimeError(
                "forward_backward: another data-parallel rank could not read or plan its microbatches, and its own error says why; "
                "this one stops with it, before anything has run."
            )
    if failure is not None:
        raise failure
    return cast(_Made, made)


def gather_batch(door: Door, handle: PrefixReuseHandle) -> Batch:
    """This rank's sequences, and those of the data-parallel ranks that exchange tokens with it (collective among them)."""
    groups = handle.groups
    own = ([call.sequences for call in door.loss_calls], door.num_tokens)
    of_ranks = {groups.data_rank: own}
    if handle.expert_block > 1:
        is_first = groups.tensor_rank == groups.context_rank == groups.pipeline_rank == 0
        told: list[Any] = [None] * handle.planning_group.size()
        dist.all_gather_object(told, (groups.data_rank, own) if is_first else None, group=handle.planning_group)
        of_ranks = dict(sorted((pair for pair in told if pair is not None), key=lambda pair: pair[0]))
    return _batch_of(of_ranks, groups.data_rank)


def _batch_of(of_ranks: Mapping[int, tuple[list[tuple[SequenceInput, ...]], int]], data_rank: int) -> Batch:
    trajectories: list[Trajectory] = []
    placement: list[int] = []
    joint: list[int] = []
    calls: list[int] = []
    number = 0
    for rank, (loss_calls, _) in of_ranks.items():
        for sequences in loss_calls:
            if rank == data_rank:
                calls.append(number)
            trajectories += [_trajectory(sequence, len(trajectories) + k) for k, sequence in enumerate(sequences)]
            placement += [rank] * len(sequences)
            joint += [number] * len(sequences)
            number += 1
    if not trajectories:
        # A plan is never of nothing. No loss call has this one, and nothing of it is run.
        nothing = SequenceInput(np.zeros(1, np.int64), np.zeros(1, bool))
        trajectories, placement, joint = [_trajectory(nothing, 0)], [min(of_ranks)], [number]
    return Batch(
        tuple(trajectories),
        tuple(placement),
        tuple(joint),
        tuple(calls),
        max(num_tokens for _, num_tokens in of_ranks.values()),
        any(t.routes is not None for t in trajectories),
    )


def _trajectory(sequence: SequenceInput, number: int) -> Trajectory:
    scored = sequence.scored
    if scored is None:
        scored = np.arange(len(sequence.tokens)) > 0
    return Trajectory(
        id=str(number),
        group=_GROUP,
        tokens=sequence.tokens,
        loss_mask=scored,
        advantages=0.0,
        temperature=sequence.temperature,
        routes=sequence.routes,
    )


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """By Megatron's own timer of a step, which an error must not leave running: it could not be started again."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        config.timers("forward-backward").stop()


@contextlib.contextmanager
def _unfinished(config: Any) -> Iterator[None]:
    """Megatron's schedule leaves gradients as the last backward left them."""
    names = ("finalize_model_grads_func", "grad_sync_func", "param_sync_func", "no_sync_func", "timers")
    kept = {name: getattr(config, name) for name in names}
    try:
        for name in names:
            setattr(config, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


def _metrics(sums: Sums, *, fallback: bool) -> dict[str, float]:
    """Counters of a step, over all data-parallel ranks.

    shared_tokens_ratio: part of the tokens that were not computed. reuse_ratio: tokens over computed tokens. bound: dense FLOPs over
    those computed. fallback: 1 where Megatron's own schedule ran.
    """

    def ratio(of: float, over: float) -> float:
        return of / over if over else 1.0

    return {
        "prefixflow/shared_tokens_ratio": 1.0 - ratio(sums.computed_tokens, sums.logical_tokens),
        "prefixflow/reuse_ratio": ratio(sums.logical_tokens, sums.computed_tokens),
        "prefixflow/bound": ratio(sums.baseline_flops, sums.reuse_flops),
        "prefixflow/fallback": float(fallback),
    }
