"""`prefixflow parity`: the shipped path against the independent reference, gradient by gradient.

Both sides start from the same weights and take two optimizer steps, so that state left over from the first step shows in
the second. The reference runs on one process (`megatron.prefixflow.reference`); the shipped path runs in the world that the
layout asks for. bfloat16 compares both sides with float64: the shipped path may be at most twice as far from it
as the dense reference in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.prefixflow.arguments import (
    Arguments,
    ddp_config,
    gpt_model_kwargs,
    loss_config,
    memory_settings,
    parallel_layout,
    parse_arguments,
    plan_config,
    shape_of,
    transformer_config,
)
from megatron.prefixflow.arguments_result import TRAINING_ONLY
from megatron.prefixflow.arguments_spec import flag_of
from megatron.prefixflow.calibration import is_measuring
from megatron.prefixflow.data import step_batches, with_temperature
from megatron.prefixflow.gradients import clip_gradients, gradient_norm, reduce_gradients
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.model import build_model, wrap_data_parallel
from megatron.prefixflow.overlap import EarlyReduction
from megatron.prefixflow.peaks import measured_memory, predicted_memory, state_bytes
from megatron.prefixflow.reference import (
    Reference,
    UpdateSettings,
    build_reference_model,
    effective_routes,
    reference_config,
)
from megatron.prefixflow.router import has_router_terms
from megatron.prefixflow.routing import RouterTotals, RouteStore, RoutingReplay
from megatron.prefixflow.session import start_session
from megatron.prefixflow.shards import expert_biases, full_gradients, global_routers, load_full_parameters
from megatron.prefixflow.step import StepRunner, complete_logprobs
from megatron.prefixflow.verify import TOLERANCE, TOLERANCE_MOE, forward_place
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import Plan
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.cache import CacheTotals
from prefixflow.runtime.objective import Objective
from prefixflow.runtime.world import WorldError, Worlds
from prefixflow.schedule.memory import Holder
from prefixflow.schedule.order import backward_order, forwards_needed, lead
from prefixflow.trajectories.reader import read_trajectories
from prefixflow.trajectories.types import RouteShape, Trajectory

NUM_STEPS = 2
BF16_FACTOR = 2.0
# Share of the weights' norm that the first update moves, so that a wrong first step shows in the second.
FIRST_UPDATE = 0.02
# The norm is clipped to this share of the first step's: far enough below for the second step to be clipped as well.
CLIPPED_NORM = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: `argv` are the arguments of pretrain_rl.py that say what to compute."""

    file: str
    argv: tuple[str, ...]
    dump: str | None = None

    @property
    def arguments(self) -> Arguments:
        return parse_arguments(self.argv, training=False)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Where one reference run leaves its results, and how both sides update."""

    folder: str
    update: UpdateSettings
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    router_losses: tuple[float, ...]

    def grads(self, step: int) -> dict[str, Tensor]:
        return load_file(f"{self.folder}/grads_{step}.safetensors")

    def logprobs(self, step: int) -> list[np.ndarray]:
        with np.load(f"{self.folder}/logprobs_{step}.npz") as data:
            return [data[str(i)] for i in range(len(data.files))]

    def expert_counts(self, step: int) -> dict[str, Tensor]:
        return load_file(f"{self.folder}/counts_{step}.safetensors")

    @property
    def routes(self) -> str:
        """File of the routes that the first step took, in the form of a trajectory file's routes."""
        return f"{self.folder}/taken.routes.safetensors"


class Runner:
    """Runs cases in as few worlds and reference runs as they need."""

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        setup: Callable[[], None] | None = None,
        worlds: Worlds | None = None,
    ) -> None:
        """folder: for weights and reference results. worlds: by default new ones, closed on exit."""
        self.folder = folder
        self.timeout_s = timeout_s
        self.setup = setup
        self._owns_worlds = worlds is None
        self._worlds = worlds or Worlds()
        self._references: dict[str, SideFiles] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._owns_worlds:
            self._worlds.close()

    def run(self, case: Case) -> dict[str, Any]:
        """The result of one case, as the interface's JSON object; a run that breaks off is not ok."""
        args = case.arguments
        try:
            return self._run(case, args)
        except WorldError as error:
            return {
                "ok": False,
                "world": parallel_layout(args).world_size,
                "dtype": str(args.params_dtype).removeprefix("torch."),
                "reasons": [f"the run broke off: {error}"],
            }

    def _run(self, case: Case, args: Arguments) -> dict[str, Any]:
        weights = self._weights(case, args)
        dtype = args.params_dtype
        if dtype != torch.bfloat16:
            reference = self._reference(case, args, weights, dtype)
            result = self._reuse(case, args, weights, reference)
            return _judge_exact(result, args)
        exact = self._reference(case, args, weights, torch.float64)
        # Routes flip between precisions: all sides take those of the first step in float64.
        pinned = exact.routes if args.num_experts else None
        dense = self._reference(case, args, weights, torch.bfloat16, pinned)
        result = self._reuse(case, args, weights, exact, pinned)
        return _judge_bf16(result, args, exact, dense)

    def _weights(self, case: Case, args: Arguments) -> str:
        """Initial weights, one file for every case with this model, dtype and seed."""
        key = _key(args.shape_key, args.hf_model, args.params_dtype, args.seed)
        path = self.folder / f"weights_{key}.safetensors"
        if not path.exists():
            self._worlds[1].run(write_weights, case, str(path), timeout_s=self.timeout_s)
        return str(path)

    def _reference(
        self, case: Case, args: Arguments, weights: str, dtype: torch.dtype, pinned: str | None = None
    ) -> SideFiles:
        key = _key(case.file, weights, dtype, pinned, args.reference_key, args.was_given("clip_grad"))
        if key not in self._references:
            folder = self.folder / f"reference_{key}"
            folder.mkdir()
            self._references[key] = self._worlds[1].run(
                run_reference, case, weights, str(folder), dtype, pinned, timeout_s=self.timeout_s
            )[0]
        return self._references[key]

    def _reuse(
        self, case: Case, args: Arguments, weights: str, reference: SideFiles, pinned: str | None = None
    ) -> dict[str, Any]:
        world = self._worlds[parallel_layout(args).world_size]
        return world.run(run_reuse, case, weights, reference, pinned, self.setup, timeout_s=self.timeout_s)[0]


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def write_weights(case: Case, path: str) -> None:
    """Write initial weights, rounded to the run's dtype, under Megatron names, unsharded, vocabulary unpadded."""
    args = case.arguments
    model = _reference_model(args, args.params_dtype)
    if args.hf_model is not None:
        from megatron.prefixflow import bridge

        bridge.load_hf_weights([model], args.hf_model)
    else:
        generator = torch.Generator().manual_seed(args.seed + 1)
        for parameter in model.parameters():
            # Norms start at one everywhere, which would hide a norm applied to the wrong tensor.
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += 0.1 * noise.to(parameter)
    save_file({name: p.detach().contiguous() for name, p in _weights_of(model)}, path)


def _weights_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the routers' biases, of the reference model."""
    yield from model.named_parameters()
    yield from expert_biases(model)


def _reference_model(args: Arguments, dtype: torch.dtype) -> torch.nn.Module:
    start_session(ParallelLayout(), args.seed)
    config = reference_config(transformer_config(args))
    config = dataclasses.replace(config, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    kwargs = {**gpt_model_kwargs(args), "vocab_size": args.vocab_size}
    return build_reference_model(config, **kwargs).to(dtype)


def run_reference(case: Case, weights: str, folder: str, dtype: torch.dtype, pinned: str | None) -> SideFiles:
    """Two steps of the reference in `dtype`; gradients and log-probabilities of each go to `folder`.

    pinned: file of the routes to take; None takes those of the trajectories, or Megatron's.
    """
    args = case.arguments
    trajectories: Sequence[Trajectory] = _read(case, args)
    if pinned is not None:
        trajectories = _with_routes(trajectories, pinned)
    elif args.routing_replay == "rollout":
        trajectories = effective_routes(trajectories, args.route_mismatch)
    model = _reference_model(args, dtype)
    _load(model, weights)
    reference = Reference(model, loss_config(args), args.max_response_length)
    settings: UpdateSettings | None = None
    losses, norms, router_losses = [], [], []
    for step in range(NUM_STEPS):
        result = reference.step(trajectories)
        save_file(result.grads, f"{folder}/grads_{step}.safetensors")
        arrays: Any = {str(i): lp.double().numpy() for i, lp in enumerate(result.logprobs)}
        np.savez(f"{folder}/logprobs_{step}.npz", **arrays)
        losses.append(result.loss)
        norms.append(result.norm)
        router_losses.append(_weighted_router_losses(args, result.router_losses))
        save_file(result.expert_counts, f"{folder}/counts_{step}.safetensors")
        if step == 0 and args.params_dtype == torch.bfloat16 and args.num_experts and pinned is None:
            taken = {t.id: torch.from_numpy(r) for t, r in zip(trajectories, result.routes, strict=True) if r.size}
            save_file(taken, f"{folder}/taken.routes.safetensors")
            trajectories = _with_routes(trajectories, f"{folder}/taken.routes.safetensors")
        settings = settings or _update_settings(args, model, result.norm)
        reference.update(result, settings)
    assert settings is not None
    return SideFiles(folder, settings, tuple(losses), tuple(norms), tuple(router_losses))


def _weighted_router_losses(args: Arguments, values: Mapping[str, float]) -> float:
    """The routers' part of the loss, with its coefficients."""
    names = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    kinds = zip(args.moe_router_load_balancing_type, args.moe_aux_loss_coeff, strict=True)
    total = sum(coeff * values.get(names.get(kind, ""), 0.0) for kind, coeff in kinds)
    return total + (args.moe_z_loss_coeff or 0.0) * values.get("z_loss", 0.0)


def _with_routes(trajectories: Sequence[Trajectory], path: str) -> tuple[Trajectory, ...]:
    stored = load_file(path)
    shape = next(iter(stored.values())).shape[1:]
    # A trajectory of one token is not run.
    empty = torch.zeros(0, *shape, dtype=torch.int64)
    return tuple(replace(t, routes=stored.get(t.id, empty).numpy()) for t in trajectories)


def _load(model: torch.nn.Module, weights: str) -> None:
    stored = load_file(weights)
    with torch.no_grad():
        for name, tensor in _weights_of(model):
            tensor.copy_(stored[name])


def _update_settings(args: Arguments, model: torch.nn.Module, norm: float) -> UpdateSettings:
    """An update that moves the weights visibly, with clipping active, unless the arguments say otherwise."""
    max_norm = args.clip_grad if args.was_given("clip_grad") else CLIPPED_NORM * norm
    weight_norm = math.sqrt(sum(float(p.double().square().sum()) for p in model.parameters()))
    moved = min(norm, max_norm) if max_norm > 0 else norm
    # The distributed optimizer of Megatron takes Adam only.
    optimizer = "adam" if args.use_distributed_optimizer else "sgd"
    sgd_lr = FIRST_UPDATE * weight_norm / moved if moved > 0 else 1.0
    return UpdateSettings(
        optimizer=optimizer,
        lr=sgd_lr if optimizer == "sgd" else 1e-3,
        momentum=0.9,
        adam_betas=(0.9, 0.999),
        # Far above rounding: an element whose gradient is noise must not move by a full step.
        adam_eps=1e-3,
        max_norm=max_norm,
    )


def run_reuse(
    case: Case, weights: str, reference: SideFiles, pinned: str | None, setup: Callable[[], None] | None
) -> dict[str, Any]:
    """Two steps of the shipped path on this rank; rank 0 returns the comparison, the others an empty object."""
    args = case.arguments
    if setup is not None:
        setup()
    parallel = parallel_layout(args)
    groups = start_session(parallel, args.seed)
    trajectories = _read(case, args)
    if pinned is not None:
        trajectories = _with_routes(trajectories, pinned)
        args = args.replace(routing_replay="rollout", route_mismatch="exact")
    config = transformer_config(args)
    chunks = build_model(config, groups, **gpt_model_kwargs(args))
    full = load_file(weights)
    load_full_parameters(chunks, full, groups, gated=config.gated_linear_unit)
    ddp = wrap_data_parallel(chunks, ddp_config(args))
    for chunk in ddp:
        chunk.broadcast_params()
    optimizer = _megatron_optimizer(args, reference.update, ddp)
    runner = StepRunner(
        chunks,
        groups,
        select_kernel(args.attention_kernel, next(chunks[0].parameters()).device),
        vocab_size=args.vocab_size,
        max_response_tokens=args.max_response_length,
        routing_replay=RoutingReplay(args.routing_replay),
        memory=memory_settings(args, parallel),
    )
    runner.reduction = EarlyReduction.of(ddp, groups)
    loss = loss_config(args)
    plan = runner.plan(
        trajectories,
        plan_config(args, parallel),
        loss,
        skip_zero_advantage=args.skip_zero_advantage and not has_router_terms(config),
    )
    trajectories = complete_logprobs(runner, plan, trajectories, loss)
    comparison = Comparison(args, case, trajectories, plan, groups, has_head=runner.has_head)
    for step in range(NUM_STEPS):
        for chunk in ddp:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        routes = RouteStore()
        if runner.routing_replay is RoutingReplay.RECORD:
            runner.score(plan, trajectories, routes=routes)
        with contextlib.ExitStack() as stack:
            measured = stack.enter_context(measured_memory(runner, plan)) if args.measure_memory else None
            objective = runner.forward_backward(plan, trajectories, loss, routes=routes)
        if measured is not None:
            comparison.memory = _peaks(runner, plan, trajectories, state_bytes(ddp), measured.peak_bytes)
        routing = _routing_outcome(chunks, runner.router_totals)
        reduce_gradients(ddp)
        norm = gradient_norm(ddp, groups)
        grads = full_gradients(ddp, groups, gated=config.gated_linear_unit, vocab_size=args.vocab_size)
        comparison.add(step, objective, grads, norm, runner, routing, reference)
        clip_gradients(ddp, reference.update.max_norm, norm)
        optimizer.step()
    return comparison.result(reference, full) if dist.get_rank() == 0 else {}


def _peaks(
    runner: StepRunner, plan: Plan, trajectories: Sequence[Trajectory], state: int, measured: int
) -> tuple[int, int]:
    """Most bytes of any rank in this step, measured and predicted, without the optimizer; collective."""
    groups, settings = runner.groups, runner.memory
    assert settings is not None
    curve = predicted_memory(settings, plan, trajectories, groups.data_rank, groups.pipeline_rank)
    weights = settings.model.state(groups.pipeline_rank)
    predicted = weights[Holder.WEIGHTS] + weights[Holder.GRADIENTS] + max((p.total_bytes for p in curve), default=0)
    found = torch.tensor([state + measured, predicted], dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found[0]), int(found[1])


@dataclass(frozen=True, slots=True)
class RoutingOutcome:
    """What the routers of the whole model did in one step: sums over ranks, and positions per expert by router."""

    num_replayed: int
    num_native: int
    losses: float
    expert_counts: dict[str, Tensor]


def _routing_outcome(chunks: Sequence[Any], totals: RouterTotals) -> RoutingOutcome:
    """Collective; before the gradients are reduced, which takes the counts into the biases.

    Every rank routes positions of its own: experts under tensor parallelism need sequence parallelism.
    """
    counts: dict[str, Tensor] = {}
    for chunk in chunks:
        for name, router in global_routers(chunk):
            if router.local_tokens_per_expert is not None:
                counts[name] = router.local_tokens_per_expert.double().round().long()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (totals, counts))
    summed: dict[str, Tensor] = {}
    for _, part in everyone:
        for name, count in part.items():
            summed[name] = summed.get(name, 0) + count
    return RoutingOutcome(
        num_replayed=sum(t.routes_replayed for t, _ in everyone),
        num_native=sum(t.routes_native for t, _ in everyone),
        losses=sum((t.load_balancing or 0.0) + (t.z or 0.0) for t, _ in everyone),
        expert_counts=summed,
    )


def _megatron_optimizer(args: Arguments, update: UpdateSettings, ddp: Sequence[Any]) -> Any:
    config = OptimizerConfig(
        optimizer=update.optimizer,
        lr=update.lr,
        sgd_momentum=update.momentum,
        adam_beta1=update.adam_betas[0],
        adam_beta2=update.adam_betas[1],
        adam_eps=update.adam_eps,
        weight_decay=0.0,
        clip_grad=0.0,
        bf16=args.params_dtype == torch.bfloat16,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, list(ddp))


def _route_shape(args: Arguments) -> RouteShape | None:
    shape = shape_of(args)
    return RouteShape(shape.num_moe_layers, shape.moe_topk, shape.num_experts) if shape.is_moe else None


def _read(case: Case, args: Arguments) -> tuple[Trajectory, ...]:
    trajectories = read_trajectories(
        case.file,
        vocab_size=args.vocab_size,
        max_positions=args.max_position_embeddings,
        routes=args.routing_replay == "rollout",
        route_shape=_route_shape(args),
    )
    trajectories = with_temperature(trajectories, args.temperature)
    if not args.filter and args.advantage_estimator is None:
        return trajectories
    batches = step_batches(args.replace(global_batch_size=len(trajectories)), trajectories)
    if not batches:
        raise ValueError(f"--filter {' '.join(args.filter)} leaves nothing of {case.file} to compare.")
    return batches[0]


class Comparison:
    """Compares each step on rank 0; `add` is collective.

    memory (attribute): `_peaks` of the last step; None where they are not measured.
    """

    def __init__(
        self,
        args: Arguments,
        case: Case,
        trajectories: Sequence[Trajectory],
        plan: Plan,
        groups: Groups,
        *,
        has_head: bool,
    ) -> None:
        self.args = args
        self.groups = groups
        self.has_head = has_head
        self.case = case
        self.trajectories = trajectories
        self.plan = plan
        self.computed_tokens = 0
        self.context_bytes = self.context_bytes_planned = self.peak_shards = 0
        self.cache_totals: Sequence[CacheTotals] = ()
        self.host_bytes: Sequence[int] = ()
        self.num_recomputed: Sequence[int] = ()
        self.steps: list[dict[str, Any]] = []
        self.first_grads: dict[str, Tensor] = {}
        self.first_logprobs: dict[int, np.ndarray] = {}
        self.first_routing = RoutingOutcome(0, 0, 0.0, {})
        self.first_norm = 0.0
        self.memory: tuple[int, int] | None = None

    def add(
        self,
        step: int,
        objective: Objective,
        grads: dict[str, Tensor],
        norm: float,
        runner: StepRunner,
        routing: RoutingOutcome,
        reference: SideFiles,
    ) -> None:
        loss = float(objective.terms.loss) if objective.terms is not None else 0.0
        mine = (objective.trajectory_logprobs(), loss, runner.num_computed_tokens)
        moved = torch.tensor([runner.context_bytes, runner.context_bytes_planned])
        totals = (runner.cache_totals, runner.arena.peak_bytes, runner.num_recomputed, runner.peak_shards)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (moved, totals, *mine, self.has_head, self.groups.data_rank))
        if dist.get_rank() != 0:
            return
        self.context_bytes, self.context_bytes_planned = sum(moved for moved, *_ in everyone).tolist()
        self.cache_totals, self.host_bytes, self.num_recomputed, shards = zip(
            *(totals for _, totals, *_ in everyone), strict=True
        )
        self.peak_shards = max(shards)
        # Ranks that hold the same trajectories (tensor and context parallel) report the same values: take one of each.
        distinct = {position: item for _, _, *item, scores, position in reversed(everyone) if scores}
        logprobs = {i: lp for item in distinct.values() for i, lp in item[0].items()}
        self.computed_tokens = sum(item[2] for item in distinct.values())
        if step == 0:
            self.first_grads, self.first_logprobs, self.first_routing = grads, logprobs, routing
            self.first_norm = norm
        errors = relative_errors(grads, reference.grads(step))
        expected_loss = reference.losses[step]
        total = sum(item[1] for item in distinct.values())
        scale = max(abs(expected_loss), 1e-3 * reference.norms[step])
        self.steps.append(
            {
                "errors": errors,
                "logprob": _logprob_error(logprobs, reference.logprobs(step), self.plan),
                "loss": abs(total - expected_loss) / scale if scale else abs(total),
                "norm": abs(norm - reference.norms[step]) / max(reference.norms[step], 1e-300),
                "router_loss": abs(routing.losses - reference.router_losses[step])
                / max(abs(reference.router_losses[step]), 1e-300),
                "counts": _count_error(routing.expert_counts, reference.expert_counts(step)),
            }
        )

    def result(self, reference: SideFiles, weights: dict[str, Tensor]) -> dict[str, Any]:
        worst, worst_step, worst_error = "", 0, -1.0
        for index, step in enumerate(self.steps):
            for name, error in step["errors"].items():
                if not error <= worst_error:
                    worst, worst_step, worst_error = name, index, error
        if self.case.dump:
            self._dump(reference, weights)
        leads = [_lead(self.plan, rank) for rank in range(len(self.plan.ranks))]
        return {
            "ok": False,
            "world": parallel_layout(self.args).world_size,
            "dtype": str(self.args.params_dtype).removeprefix("torch."),
            "max_rel_grad_err": worst_error,
            "worst_parameter": worst,
            "worst_step": worst_step,
            "first_parameter_differing": "",
            "max_logprob_err": max(s["logprob"] for s in self.steps),
            "loss_rel_err": max(s["loss"] for s in self.steps),
            "grad_norm_rel_err": max(s["norm"] for s in self.steps),
            "grad_norm": reference.norms[0],
            "grad_norm_reuse": self.first_norm,
            "clipped": 0 < reference.update.max_norm < min(reference.norms),
            "logical_tokens": self.plan.forest.logical_tokens,
            "computed_tokens": self.computed_tokens,
            "planned_tokens": self.plan.forest.computed_tokens,
            "shared_segments": self.plan.forest.num_shared_segments,
            "microbatches": self.plan.num_microbatches,
            "lead": max(leads, default=0),
            "context_bytes": self.context_bytes,
            "context_bytes_planned": self.context_bytes_planned,
            "peak_context_shards": self.peak_shards,
            "peak_bytes": None if self.memory is None else self.memory[0],
            "peak_bytes_predicted": None if self.memory is None else self.memory[1],
            "peak_cache_bytes": max(totals.peak_bytes for totals in self.cache_totals),
            "host_bytes": max(self.host_bytes),
            "evictions": sum(totals.num_evictions for totals in self.cache_totals),
            "streamed_parts": sum(totals.num_streams for totals in self.cache_totals),
            "recomputed_blocks": sum(totals.num_recomputes for totals in self.cache_totals),
            "recomputed_microbatches": sum(self.num_recomputed),
            "routes_replayed": self.first_routing.num_replayed,
            "routes_native": self.first_routing.num_native,
            "route_mismatch": None if self.plan.route_report is None else self.plan.route_report.rate,
            "max_expert_count_err": max(s["counts"] for s in self.steps),
            "router_loss_rel_err": max(s["router_loss"] for s in self.steps),
            "_errors": [s["errors"] for s in self.steps],
        }

    def _dump(self, reference: SideFiles, weights: dict[str, Tensor]) -> None:
        """`--dump`: weights and both sides' gradients of the first step, and our log-probabilities."""
        folder = Path(str(self.case.dump))
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "weights.safetensors")
        save_file(reference.grads(0), folder / "grads_reference.safetensors")
        save_file(self.first_grads, folder / "grads_reuse.safetensors")
        with open(folder / "logprobs.jsonl", "w") as out:
            for index, trajectory in enumerate(self.trajectories):
                values = self.first_logprobs.get(index, np.zeros(0)).tolist()
                out.write(json.dumps({"id": trajectory.id, "logprobs": values}) + "\n")


def _lead(plan: Plan, data_rank: int) -> int:
    reads = [m.reads for m in plan.ranks[data_rank]]
    return lead(forwards_needed(backward_order(reads)))


def relative_errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """||g - g_ref|| / max(||g_ref||, 1e-6 * global norm / sqrt(parameters)) by name; inf where one side is missing."""
    total = math.sqrt(sum(float(g.double().square().sum()) for g in reference.values()))
    floor = 1e-6 * total / math.sqrt(max(len(reference), 1))
    errors: dict[str, float] = {}
    for name in sorted({*ours, *reference}):
        if name not in ours or name not in reference or ours[name].shape != reference[name].shape:
            errors[name] = math.inf
            continue
        expected = reference[name].double()
        difference = float((ours[name].double() - expected).norm())
        scale = max(float(expected.norm()), floor)
        error = difference / scale if scale else difference
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def _count_error(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> int:
    """Largest difference of the positions that an expert got, over all routers with a bias."""
    assert ours.keys() == reference.keys(), f"routers {sorted(ours)} against {sorted(reference)}"
    return max((int((ours[name] - reference[name]).abs().max()) for name in ours), default=0)


def _logprob_error(ours: dict[int, np.ndarray], reference: list[np.ndarray], plan: Plan) -> float:
    worst = 0.0
    for index, expected in enumerate(reference):
        if index in plan.forest.omitted:
            continue
        got = ours.get(index)
        if got is None or got.shape != expected.shape or not np.isfinite(got).all():
            return math.inf
        if len(expected):
            worst = max(worst, float(np.abs(got - expected).max()))
    return worst


def _failures(result: dict[str, Any], args: Arguments) -> list[str]:
    """Reasons for exit 1 that do not depend on the dtype."""
    reasons = []
    if result["grad_norm"] == 0:
        reasons.append("the whole reference gradient is zero, so nothing was compared")
    is_wanted = args.prefix_reuse == "on" or args.require_sharing
    if is_wanted and result["shared_segments"] == 0:
        reasons.append("nothing was shared although reuse was asked for (--prefix-reuse off compares dense)")
    if result["computed_tokens"] != result["planned_tokens"]:
        reasons.append(f"{result['computed_tokens']} tokens were computed, the plan says {result['planned_tokens']}")
    budget = memory_settings(args, parallel_layout(args)).kv_budget_bytes
    if budget is not None and result["peak_cache_bytes"] > budget:
        reasons.append(
            f"K/V and their gradients held {result['peak_cache_bytes']} bytes on the device of a rank, the budget is {budget}"
        )
    return reasons


def _finish(result: dict[str, Any], reasons: list[str]) -> dict[str, Any]:
    result["ok"] = not reasons
    result["reasons"] = reasons
    return {k: v for k, v in result.items() if not k.startswith("_")}


def _judge_exact(result: dict[str, Any], args: Arguments) -> dict[str, Any]:
    dtype = args.params_dtype
    tolerance = (TOLERANCE_MOE if args.num_experts else TOLERANCE)[dtype]
    reasons = _failures(result, args)
    if result["max_expert_count_err"]:
        reasons.append(f"the positions that an expert got differ by {result['max_expert_count_err']}")
    if not result["router_loss_rel_err"] <= 100 * tolerance:
        reasons.append(f"the losses of the routers differ by {result['router_loss_rel_err']:.3g} of their value")
    if not result["max_rel_grad_err"] <= tolerance:
        reasons.append(
            f"gradient of {result['worst_parameter']} in step {result['worst_step'] + 1} differs by "
            f"{result['max_rel_grad_err']:.3g}, limit {tolerance:g}"
        )
        first = _first_differing(result["_errors"], tolerance)
        result["first_parameter_differing"] = first
        reasons.append(f"the first parameter in forward order that differs is {first}")
    # Absolute, on values of order 10; looser than the gradients' by the vocabulary's logarithm.
    if not result["max_logprob_err"] <= 100 * tolerance:
        reasons.append(f"log-probabilities differ by {result['max_logprob_err']:.3g}")
    return _finish(result, reasons)


def _judge_bf16(result: dict[str, Any], args: Arguments, exact: SideFiles, dense: SideFiles) -> dict[str, Any]:
    """Distance from float64 over all parameters, per step: ours against the dense reference's own."""
    dense_errors = [relative_errors(dense.grads(step), exact.grads(step)) for step in range(NUM_STEPS)]
    result["dense_err"] = max(_rms(errors) for errors in dense_errors)
    result["reuse_err"] = max(_rms(errors) for errors in result["_errors"])
    result["dense_max_err"] = max(max(errors.values()) for errors in dense_errors)
    reasons = _failures(result, args)
    limit = BF16_FACTOR * result["dense_err"]
    if not result["reuse_err"] <= limit:
        reasons.append(
            f"distance from float64 is {result['reuse_err']:.3g}, the dense run's own is "
            f"{result['dense_err']:.3g}, limit twice that"
        )
    return _finish(result, reasons)


def _rms(errors: dict[str, float]) -> float:
    return math.sqrt(sum(e * e for e in errors.values()) / max(len(errors), 1))


def _first_differing(errors: list[dict[str, float]], tolerance: float) -> str:
    for step in errors:
        bad = [name for name, error in step.items() if not error <= tolerance]
        if bad:
            return min(bad, key=forward_place)
    return ""


def run(
    cases: Sequence[Case], *, timeout_s: float = 900.0, setup: Callable[[], None] | None = None
) -> list[dict[str, Any]]:
    """Results of all cases in order. `setup` is called in every process of the shipped path before it starts."""
    with (
        tempfile.TemporaryDirectory(prefix="prefixflow-parity-") as folder,
        Runner(Path(folder), timeout_s, setup) as runner,
    ):
        return [runner.run(case) for case in cases]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="prefixflow parity",
        description=__doc__,
        allow_abbrev=False,
        epilog="Every argument of pretrain_rl.py that changes the computation is taken too (docs/arguments.md): --model, "
        "--dtype, --tp, --pp, --dp, --max-tokens, --recompute, --policy-loss, ... Default: --prefix-reuse on.",
    )
    parser.add_argument("file", help="trajectory file")
    parser.add_argument(
        "--dump",
        help="folder for weights, gradients and log-probabilities; of each of several cases one of its number in it",
    )
    parser.add_argument(
        "--cases",
        help="file with one set of arguments a line, each a case; one that is refused fails, and the others run",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a case")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a case may take")
    options, rest = parser.parse_known_args(argv)
    try:
        lines = _lines(options.cases)
    except (ValueError, OSError) as error:
        return _refused(str(error))
    cases = [
        Case(options.file, tuple(_defaults() + rest + more), _dump_folder(options, number))
        for number, more in enumerate(lines, 1)
    ]
    ok = True
    with (
        tempfile.TemporaryDirectory(prefix="prefixflow-parity-") as folder,
        Runner(Path(folder), options.timeout) as runner,
    ):
        for case in cases:
            problem = _problem(case)
            if problem is not None and options.cases is None:
                return _refused(problem)
            # The other lines of a file of cases are still worth running.
            result = runner.run(case) if problem is None else _not_run(problem)
            ok = ok and result["ok"]
            _print(case, result, as_json=options.json)
    return 0 if ok else 1


def _dump_folder(options: argparse.Namespace, number: int) -> str | None:
    """Cases would write over each other."""
    if options.dump is None or options.cases is None:
        return options.dump
    return str(Path(options.dump) / str(number))


def _refused(sentence: str) -> int:
    print(f"prefixflow parity: {sentence}", file=sys.stderr)
    return 2


def _problem(case: Case) -> str | None:
    """Why a case cannot run; None where it can."""
    try:
        _check(case)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _not_run(problem: str) -> dict[str, Any]:
    return {"ok": False, "world": None, "dtype": None, "reasons": [f"refused: {problem.removesuffix('.')}"]}


def _check(case: Case) -> None:
    """Refuse what cannot run before a world starts: plans need no process group."""
    args = case.arguments
    _warn(args)
    if args.measure_memory and torch.cuda.is_available():
        raise ValueError(
            "--measure-memory counts tensors on the CPU, which a GPU's backward is out of sight of. Leave it out; the metrics of "
            "pretrain_rl.py have the peak of the GPU's allocator."
        )
    if is_measuring(args):
        raise ValueError(f"--calibrate {args.calibrate} does not exist, and parity measures nothing; bench does.")
    trajectories = _read(case, args)
    layout = parallel_layout(args)
    # A budget that is too small is refused on every rank alike.
    plan, settings = memory_settings(args, layout).fitted(trajectories, plan_config(args, layout))
    settings.plan_row(plan, 0, 0, training=True)
    transformer_config(args)
    lacking = [t.id for t in trajectories if t.rollout_logprobs is None]
    if loss_config(args).tis_cap is not None and lacking:
        raise ValueError(f"--tis-cap needs rollout_logprobs, and trajectory {lacking[0]!r} of {case.file} brings none.")


def _warn(args: Arguments) -> None:
    """Say what was given and changes nothing here."""
    # Of a checkpoint the architecture is read, where that is asked for.
    read = {"load", "ckpt_step", "pretrained_checkpoint"} if args.use_checkpoint_args else set()
    idle = [*args.no_effect, *(flag_of(dest) for dest in sorted((args.given & TRAINING_ONLY) - read))]
    for sentence in (*([f"no effect here: {' '.join(idle)}"] if idle else []), *args.warnings):
        print(f"prefixflow parity: {sentence}", file=sys.stderr)


def _defaults() -> list[str]:
    return ["--prefix-reuse", "on"]


def _lines(path: str | None) -> list[list[str]]:
    if path is None:
        return [[]]
    lines = [shlex.split(line, comments=True) for line in Path(path).read_text().splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise ValueError(f"--cases {path}: expected a set of arguments on each line, found none.")
    return found


def _print(case: Case, result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, allow_nan=True), flush=True)
        return
    table = Table(title=f"parity {case.file} {shlex.join(case.argv)}", show_header=False)
    for name, value in result.items():
        if name != "reasons":
            table.add_row(name, f"{value:.3e}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    for reason in result["reasons"]:
        console.print(f"[red]FAILED[/red]: {reason}.")


if __name__ == "__main__":
    sys.exit(main())
