"""Routers under a plan against an untouched Megatron-Core model, trajectory by trajectory.

Megatron rounds router scores to float32, so the two sides agree to about 1e-7. The reference here is Megatron's own router
with its own auxiliary losses, counts and replay hook; nothing of `megatron.prefixflow.router` runs in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter

from megatron.prefixflow.configs import cpu_safe
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.model import build_model
from megatron.prefixflow.reference import Reference, build_reference_model
from megatron.prefixflow.router import PlannedRouter, SegmentRouter, TopKChoice, check_router
from megatron.prefixflow.routing import (
    RouterTotals,
    RouteStore,
    RoutingReplay,
    StageRouting,
    moe_layer_numbers,
    route_shape,
)
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner
from prefixflow.forest import RouteMismatch
from prefixflow.plan.batch import microbatch_arrays
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.runtime.attention.function import Operation
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.router_losses import RouterLosses
from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import Style, trees, two_level_groups
from prefixflow.trajectories import RouteShape, Trajectory

VOCAB_SIZE, NUM_EXPERTS, TOPK = 61, 8, 2
LIMIT = 1e-6
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = {**SIGMOID, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Case:
    """config: fields of `TransformerConfig`; shipped: those of the shipped side alone.

    routes: None, or the share of positions whose routes the trajectories bring; the others are -1.
    mutant: a fault of the shipped side.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    shipped: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 16
    token_multiple: int = 1
    routes: float | None = None
    mutant: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """Of two backward passes in a row: relative errors by parameter, the counters of both sides, totals of the first."""

    errors: dict[str, float]
    counts: tuple[list[list[float]], list[list[float]]]
    totals: RouterTotals
    num_computed: int
    num_microbatches: int

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    @property
    def worst_router(self) -> float:
        return max(error for name, error in self.errors.items() if "router" in name)


def batch(known_routes: float | None = None) -> tuple[Trajectory, ...]:
    """A tree of depth 3, a group, a strict prefix, an identical trajectory and a single token."""
    style = Style(vocab_size=VOCAB_SIZE)
    made = list(trees(1, 3, 2, (2, 6), seed=3, style=style) + two_level_groups(1, 3, (10, 14), (3, 6), style=style))
    made = [replace(t, advantages=np.full(len(t), (-1.0) ** i * (1 + i))) for i, t in enumerate(made)]
    longest = made[0]
    # Its last token must be trained, or the reference leaves the trajectory out.
    end = int(np.flatnonzero(longest.loss_mask)[-2]) + 1
    arrays = {name: getattr(longest, name)[:end] for name in ("tokens", "loss_mask", "advantages")}
    made.append(replace(longest, id="prefix", **arrays))
    made.append(replace(longest, id="same"))
    if known_routes is not None:
        made = [replace(t, routes=routes_of(t, known_routes)) for t in made]
    one = {name: getattr(longest, name)[:1] for name in ("tokens", "loss_mask", "advantages")}
    made.append(replace(longest, id="one", routes=None if known_routes is None else np.zeros((0, 2, TOPK), int), **one))
    return tuple(made)


def routes_of(trajectory: Trajectory, share: float) -> np.ndarray:
    """Random routes that depend on the token path alone, so that all trajectories through a position agree."""
    rows = np.full((len(trajectory) - 1, 2, TOPK), -1)
    for t in range(len(rows)):
        rng = np.random.default_rng([*trajectory.tokens[: t + 2], 1])
        for layer in range(2):
            if rng.random() < share:
                rows[t, layer] = rng.permutation(NUM_EXPERTS)[:TOPK]
    return rows


def model_config(**fields: Any) -> TransformerConfig:
    base = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 24,
        "num_moe_experts": NUM_EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
    }
    return TransformerConfig(**cpu_safe(base | fields))


def gpt_kwargs() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "max_sequence_length": 128,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }


class DenseSide:
    """Gradients and counters of a step without sharing; each trajectory is run with its own routes, where there are some."""

    def __init__(
        self, model: GPTModel, batch: Sequence[Trajectory], loss: LossConfig, routes: Mapping[str, np.ndarray]
    ) -> None:
        self.batch = [replace(t, routes=routes.get(t.id)) for t in batch]
        self.routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
        self.reference = Reference(model, loss)

    def step(self) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
        for router in self.routers:
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert.zero_()
        return self.reference.step(self.batch).grads, counts_of(self.routers)


class SharedSide:
    """The shipped model, plan and router."""

    def __init__(
        self, model: GPTModel, groups: Groups, batch: Sequence[Trajectory], loss: LossConfig, case: Case
    ) -> None:
        self.model, self.batch, self.loss = model, batch, loss
        mismatch = None if case.routes is None else RouteMismatch.EXACT
        self.plan = build_plan(
            batch,
            PlanConfig(
                max_tokens_per_microbatch=case.max_tokens, token_multiple=case.token_multiple, route_mismatch=mismatch
            ),
        )
        replay = RoutingReplay.OFF if case.routes is None else RoutingReplay.ROLLOUT
        kernel = select_kernel("auto", torch.device("cpu"))
        self.runner = StepRunner([model], groups, kernel, vocab_size=VOCAB_SIZE, routing_replay=replay)

    def step(self) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
        self.model.zero_grad(set_to_none=True)
        routers = [m for m in self.model.modules() if isinstance(m, SegmentRouter)]
        for router in routers:
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert.zero_()
        self.runner.forward_backward(self.plan, self.batch, self.loss)
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return grads, counts_of(routers)


def counts_of(routers: Sequence[TopKRouter]) -> list[list[float]]:
    return [r.local_tokens_per_expert.tolist() for r in routers if r.local_tokens_per_expert is not None]


_undo: list[Callable[[], None]] = []


def patch(owner: Any, name: str, replacement: Any) -> None:
    original = vars(owner)[name]
    _undo.append(lambda: setattr(owner, name, original))
    setattr(owner, name, replacement)


def run_case(case: Case) -> Outcome:
    """Both sides from the same weights, two passes each, so that state left over from the first shows in the second."""
    groups = start_session(ParallelLayout(), seed=1)
    dense_config = model_config(**case.config)
    dense = build_reference_model(dense_config, **gpt_kwargs()).double()
    spread_biases(dense)
    (shared,) = build_model(model_config(**{**case.config, **case.shipped}), groups, **gpt_kwargs())
    missing, unexpected = shared.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert all("extra_state" in name for name in missing), missing
    loss, trajectories = LossConfig.of("grpo"), batch(case.routes)
    shared_side = SharedSide(shared, groups, trajectories, loss, case)
    routes = {t.id: rows for t, rows in zip(trajectories, shared_side.plan.routes or (), strict=False)}
    dense_side = DenseSide(dense, trajectories, loss, routes)
    if case.mutant is not None:
        case.mutant()
    try:
        steps = [(dense_side.step(), shared_side.step()) for _ in range(2)]
    finally:
        while _undo:
            _undo.pop()()
    (_, counts), (_, shared_counts) = steps[-1]
    errors: dict[str, float] = {}
    for (expected, _), (got, _) in steps:
        assert expected.keys() >= got.keys()
        floor = 1e-6 * torch.stack([g.norm() for g in expected.values()]).norm() / len(expected) ** 0.5
        for name, gradient in expected.items():
            found = got.get(name, torch.zeros_like(gradient))
            error = float((found - gradient).norm() / max(gradient.norm(), floor))
            errors[name] = max(errors.get(name, 0.0), error)
    runner = shared_side.runner
    plan = shared_side.plan
    return Outcome(
        errors, (counts, shared_counts), runner.router_totals, plan.forest.computed_tokens, len(plan.ranks[0])
    )


def spread_biases(model: GPTModel) -> None:
    """Biases that change many choices."""
    generator = torch.Generator().manual_seed(2)
    for router in model.modules():
        if isinstance(router, TopKRouter) and router.expert_bias is not None:
            router.expert_bias.copy_(0.3 * torch.randn(NUM_EXPERTS, generator=generator))


CASES: dict[str, Case] = {
    "softmax after top-k": Case(),
    "softmax before top-k": Case({"moe_router_pre_softmax": True}),
    "sigmoid and bias": Case(BIAS),
    "group-limited": Case({"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_pre_softmax": True}),
    "shared experts": Case({"moe_shared_expert_intermediate_size": 16}),
    "scaled": Case({**SIGMOID, "moe_router_topk_scaling_factor": 2.5}),
    "aux": Case(AUX),
    "aux, one microbatch": Case(AUX, max_tokens=1000),
    "seq aux and sigmoid": Case({**BIAS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}),
    "both aux": Case(
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.03, 0.07]}
    ),
    "z": Case({"moe_z_loss_coeff": 0.1}),
    "dense first layer": Case({**AUX, "moe_layer_freq": [0, 1]}),
    "all, recomputed": Case({**AUX, **BIAS, "moe_z_loss_coeff": 0.1}, FULL),
    "all, experts recomputed": Case(
        {**AUX, **BIAS, "moe_z_loss_coeff": 0.1}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    ),
    "rollout": Case({**AUX, "moe_z_loss_coeff": 0.1}, routes=1.0),
    "rollout, part unknown": Case({**BIAS, **AUX}, routes=0.6),
    "rollout, before top-k": Case({"moe_router_pre_softmax": True}, FULL, routes=0.6),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_counts_equal_megatrons(worlds: Worlds, name):
    case = CASES[name]
    (outcome,) = worlds[1].run(run_case, case)
    assert outcome.worst < LIMIT, outcome.errors
    dense, shared = outcome.counts
    assert dense == shared
    assert bool(dense) == bool(case.config.get("moe_router_enable_expert_bias"))
    assert outcome.num_microbatches == 1 or outcome.num_microbatches > 4
    totals = outcome.totals
    num_layers = sum(case.config.get("moe_layer_freq", [1, 1]))
    assert totals.routes_replayed + totals.routes_native == num_layers * outcome.num_computed
    assert bool(totals.routes_replayed) == (case.routes is not None)
    assert bool(totals.routes_native) == (case.routes != 1.0)
    assert (totals.load_balancing is None) == ("moe_aux_loss_coeff" not in case.config)
    assert (totals.z is None) == ("moe_z_loss_coeff" not in case.config)


# Faults, each of which moves a number of this file.


def replay_is_first_in_first_out() -> None:
    """A recomputation takes the routes that have waited longest, as in the usual replay queues."""
    queues: dict[int, list[torch.Tensor]] = {}
    choice = PlannedRouter._choice

    def mutant(self, context, layer):
        if context.operation is not Operation.BACKWARD:
            return choice(self, context, layer)
        taken = queues[layer].pop(0)
        rows = torch.arange(len(context.segment_of)) % len(taken)
        return TopKChoice(taken[rows].long(), is_complete=True)

    forward = PlannedRouter.forward

    def recording(self, input, padding_mask=None):
        made = forward(self, input, padding_mask)
        if self.context.operation is Operation.FORWARD:
            queues.setdefault(self.layer_number, []).append(self.context.chosen[self.layer_number])
        return made

    patch(PlannedRouter, "_choice", mutant)
    patch(PlannedRouter, "forward", recording)


def prefix_counts_taken_once() -> None:
    """A shared segment has the gradient of one of its trajectories."""

    def mutant(self, segment):
        made = original(self, segment)
        return made / len(self.forest.segments[segment].members)

    original = RouterLosses._member_weight
    patch(RouterLosses, "_member_weight", mutant)


def prefix_has_no_share() -> None:
    """The auxiliary loss does not reach shared positions."""
    gradients = RouterLosses.score_gradients

    def mutant(self, segments):
        made = gradients(self, segments)
        made[[self.forest.segments[s].is_shared for s in segments]] = 0
        return made

    patch(RouterLosses, "score_gradients", mutant)


def shared_z_loss_counts_once() -> None:
    gradients = RouterLosses.z_gradients
    patch(RouterLosses, "z_gradients", lambda self, weight: gradients(self, weight.clamp(max=1 / 20)))


def recomputation_counts_again() -> None:
    running = StageRouting.running

    @contextlib.contextmanager
    def mutant(self, context, operation):
        with running(self, context, operation):
            if operation is Operation.BACKWARD:
                for router in self.routers:
                    chosen = torch.nn.functional.one_hot(context.chosen[router.layer_number].long(), NUM_EXPERTS).sum(1)
                    router.local_tokens_per_expert += (chosen * context.multiplicity[:, None]).sum(0)
            yield

    patch(StageRouting, "running", mutant)


def shared_positions_count_once() -> None:
    context = StageRouting.context

    def mutant(self, microbatch, arrays, split):
        one_each = (arrays.multiplicity > 0).astype(np.int64)
        return context(self, microbatch, replace(arrays, multiplicity=one_each), split)

    patch(StageRouting, "context", mutant)


def padding_counts() -> None:
    context = StageRouting.context

    def mutant(self, microbatch, arrays, split):
        return context(self, microbatch, replace(arrays, multiplicity=arrays.multiplicity.clip(min=1)), split)

    patch(StageRouting, "context", mutant)


def unknown_routes_are_expert_0() -> None:
    given = StageRouting._given
    patch(StageRouting, "_given", lambda self, r: given(self, np.where(r < 0, np.arange(TOPK), r)))


def routes_of_the_next_layer() -> None:
    given = StageRouting._given
    patch(StageRouting, "_given", lambda self, routes: given(self, routes[:, ::-1]))


LOSSES = {**AUX, "moe_z_loss_coeff": 0.1}
GRADIENT_MUTANTS: dict[Callable[[], None], Case] = {
    replay_is_first_in_first_out: Case(LOSSES, FULL),
    prefix_counts_taken_once: Case(AUX),
    prefix_has_no_share: Case(AUX),
    shared_z_loss_counts_once: Case({"moe_z_loss_coeff": 0.1}),
    unknown_routes_are_expert_0: Case(routes=0.6),
    routes_of_the_next_layer: Case(routes=1.0),
}
COUNT_MUTANTS: dict[Callable[[], None], Case] = {
    recomputation_counts_again: Case(BIAS, FULL),
    shared_positions_count_once: Case(BIAS),
    padding_counts: Case(BIAS, token_multiple=8),
}


def test_padding_changes_nothing(worlds: Worlds):
    case = Case({**BIAS, **AUX, "moe_z_loss_coeff": 0.1}, token_multiple=8)
    (outcome,) = worlds[1].run(run_case, case)
    assert outcome.worst < LIMIT, outcome.errors
    assert outcome.counts[0] == outcome.counts[1]


@pytest.mark.parametrize("mutant", GRADIENT_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_fault_moves_router_gradients(worlds: Worlds, mutant):
    (outcome,) = worlds[1].run(run_case, replace(GRADIENT_MUTANTS[mutant], mutant=mutant))
    assert outcome.worst_router > 1e-2


@pytest.mark.parametrize("mutant", COUNT_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_fault_moves_counts(worlds: Worlds, mutant):
    (outcome,) = worlds[1].run(run_case, replace(COUNT_MUTANTS[mutant], mutant=mutant))
    dense, shared = outcome.counts
    assert dense != shared


# Routes kept from pass to pass, and guards.


def run_kept(replay: RoutingReplay) -> dict[str, Any]:
    """A scoring pass, a change of the routers, then two training passes over the same plan and store."""
    groups = start_session(ParallelLayout(), seed=1)
    (model,) = build_model(model_config(**BIAS), groups, **gpt_kwargs())
    trajectories = batch()
    plan = build_plan(trajectories, PlanConfig(max_tokens_per_microbatch=16))
    kernel = select_kernel("auto", torch.device("cpu"))
    runner = StepRunner([model], groups, kernel, vocab_size=VOCAB_SIZE, routing_replay=replay)
    store, totals, taken = RouteStore(), [], []
    routers = [m for m in model.modules() if isinstance(m, SegmentRouter)]
    for turn in range(3):
        if turn == 0:
            runner.score(plan, trajectories, routes=store)
        else:
            runner.forward_backward(plan, trajectories, LossConfig.of("grpo"), routes=store)
            taken.append(counts_of(routers))
        totals.append((runner.router_totals.routes_replayed, runner.router_totals.routes_native))
        for router in routers:
            router.local_tokens_per_expert.zero_()
            router.expert_bias.copy_(torch.linspace(0, turn + 1, NUM_EXPERTS))
    try:
        runner.score(build_plan(trajectories, PlanConfig(max_tokens_per_microbatch=30)), trajectories, routes=store)
        other_plan = ""
    except ValueError as error:
        other_plan = str(error)
    return {"totals": totals, "taken": taken, "num": 2 * plan.forest.computed_tokens, "other plan": other_plan}


def test_recorded_routes_hold_from_pass_to_pass(worlds: Worlds):
    (got,) = worlds[1].run(run_kept, RoutingReplay.RECORD)
    num = got["num"]
    assert got["totals"] == [(0, num), (num, 0), (num, 0)]
    assert got["taken"][0] == got["taken"][1]
    assert "expected the same plan" in got["other plan"]


def test_without_replay_nothing_is_kept(worlds: Worlds):
    (got,) = worlds[1].run(run_kept, RoutingReplay.OFF)
    assert got["totals"] == [(0, got["num"])] * 3
    assert got["taken"][0] != got["taken"][1]
    assert not got["other plan"]


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""


def run_guards() -> dict[str, str]:
    groups = start_session(ParallelLayout(), seed=1)
    (model,) = build_model(model_config(), groups, **gpt_kwargs())
    router = next(m for m in model.modules() if isinstance(m, SegmentRouter))
    forest = build_plan(batch(), PlanConfig(max_tokens_per_microbatch=16)).forest
    plan = build_plan(batch(), PlanConfig(max_tokens_per_microbatch=16))
    stage = StageRouting(model, forest, is_training=True, tp_group=groups.tensor)
    microbatch = plan.ranks[0][0]
    context = stage.context(microbatch, microbatch_arrays(forest, microbatch, batch()))

    def uncalled() -> None:
        with stage.running(context, Operation.FORWARD):
            pass

    def step(config: Mapping[str, Any], replay: RoutingReplay, plan: Plan, trajectories: Any = None) -> None:
        (own,) = build_model(model_config(**config), groups, **gpt_kwargs())
        kernel = select_kernel("auto", torch.device("cpu"))
        runner = StepRunner([own], groups, kernel, vocab_size=VOCAB_SIZE, routing_replay=replay)
        runner.forward_backward(plan, trajectories or batch(), LossConfig.of("grpo"))

    def foreign() -> None:
        routed = tuple(replace(t, routes=t.routes[:, :1]) for t in batch(1.0) if t.routes is not None)
        plan = build_plan(routed, PlanConfig(max_tokens_per_microbatch=16, route_mismatch=RouteMismatch.EXACT))
        step({}, RoutingReplay.ROLLOUT, plan, routed)

    omitting = build_plan(batch(), PlanConfig(max_tokens_per_microbatch=16), omit=[1])
    dense = build_reference_model(model_config(), **gpt_kwargs())
    return {
        "no context": error_of(lambda: router(torch.zeros(4, 1, 32, dtype=torch.float64))),
        "uncalled": error_of(uncalled),
        "context is taken off": str(router.context),
        "orphan": error_of(lambda: StageRouting(dense, forest, is_training=True, tp_group=groups.tensor)),
        "omitted": error_of(lambda: step(AUX, RoutingReplay.OFF, omitting)),
        "no routes": error_of(lambda: step({}, RoutingReplay.ROLLOUT, plan)),
        "foreign routes": error_of(foreign),
        "sinkhorn": error_of(lambda: check_router(model_config(moe_router_load_balancing_type="sinkhorn"))),
        "global": error_of(
            lambda: check_router(model_config(**{**AUX, "moe_router_load_balancing_type": "global_aux_loss"}))
        ),
        "capacity": error_of(lambda: check_router(model_config(moe_expert_capacity_factor=1.0))),
        "jitter": error_of(lambda: check_router(model_config(moe_input_jitter_eps=0.1))),
        "fused": error_of(lambda: check_router(replace(model_config(), moe_router_fusion=True))),
    }


def test_guards(worlds: Worlds):
    (errors,) = worlds[1].run(run_guards)
    words = {
        "no context": "The router of layer 1 was called without a routing context",
        "uncalled": "were called (0, 0) times",
        "context is taken off": "None",
        "orphan": "is a TopKRouter, expected a PlannedRouter",
        "omitted": "The plan leaves out trajectories [1]",
        "no routes": "needs a plan with routes",
        "foreign routes": "routes of 2 MoE layers and top-2",
        "sinkhorn": "sinkhorn is not exact",
        "global": "global_aux_loss is not exact",
        "capacity": "moe_expert_capacity_factor is not exact",
        "jitter": "moe_input_jitter_eps is not exact",
        "fused": "moe_router_fusion is not exact",
    }
    assert errors.keys() == words.keys()
    for name, expected in words.items():
        assert expected in errors[name], (name, errors[name])


def test_layers_with_experts_are_numbered_over_all_stages():
    config = model_config(num_layers=4, moe_layer_freq=2)
    assert moe_layer_numbers(config) == (1, 3)
    assert route_shape(config) == RouteShape(2, TOPK, NUM_EXPERTS)
    assert moe_layer_numbers(model_config(num_layers=4, moe_layer_freq=[0, 1, 1, 0])) == (2, 3)
    assert moe_layer_numbers(model_config(num_moe_experts=None, moe_ffn_hidden_size=None)) == ()
