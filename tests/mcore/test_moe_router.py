"""Routers under a plan against an untouched Megatron-Core model, trajectory by trajectory.

Megatron rounds router scores to float32, so the two sides agree to about 1e-7. The reference here is Megatron's own router
with its own auxiliary losses, counts and replay hook; nothing of `megatron.prefixflow.router` runs in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron.prefixflow.configs import cpu_safe
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.model import build_model
from megatron.prefixflow.reference import Reference, build_reference_model
from megatron.prefixflow.router import RoutingContext, SegmentRouter
from megatron.prefixflow.routing import RouteStore, RouterTotals, RoutingReplay, StageRouting
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.router_losses import RouterLosses
from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import Style, trees, two_level_groups
from prefixflow.trajectories import Trajectory

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


class GivenRoutes:
    """Megatron's replay hook, for one layer and one trajectory: rows with a -1 are routed natively."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = torch.from_numpy(rows)

    def get_replay_topk(self, scores: Any, topk: int, num_groups: Any, group_topk: Any, compute: Any) -> Any:
        _, indices = compute(scores, topk, num_groups, group_topk)
        for row, given in enumerate(self.rows):
            if given.min() >= 0:
                indices[row] = given
        return scores.gather(1, indices), indices


class DenseSide:
    """Megatron's model and router; gradients and counters of one step."""

    def __init__(self, model: GPTModel, batch: Sequence[Trajectory], loss: LossConfig) -> None:
        self.model, self.batch = model, batch
        self.routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
        self.reference = Reference(model, loss)

    def step(self) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
        for router in self.routers:
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert.zero_()
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / len(self.batch)))
        score = self.reference._score
        self.reference._score = lambda trajectory: (self._replay(trajectory), score(trajectory))[1]
        made = self.reference.step(self.batch)
        self.reference._score = score
        return made.grads, counts_of(self.routers)

    def _replay(self, trajectory: Trajectory) -> None:
        if trajectory.routes is not None:
            for place, router in enumerate(self.routers):
                router.router_replay = GivenRoutes(trajectory.routes[:, place])


class SharedSide:
    """The shipped model, plan and router."""

    def __init__(self, model: GPTModel, groups: Groups, batch: Sequence[Trajectory], loss: LossConfig, case: Case) -> None:
        self.model, self.batch, self.loss = model, batch, loss
        self.plan = build_plan(batch, PlanConfig(max_tokens_per_microbatch=case.max_tokens))
        replay = RoutingReplay.OFF
        if case.routes is not None:
            self.plan = replace(self.plan, routes=tuple(t.routes for t in batch))
            replay = RoutingReplay.ROLLOUT
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
    assert not unexpected and not [m for m in missing if "extra_state" not in m], (missing, unexpected)
    loss, trajectories = LossConfig.of("grpo"), batch(case.routes)
    dense_side, shared_side = DenseSide(dense, trajectories, loss), SharedSide(shared, groups, trajectories, loss, case)
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
    return Outcome(errors, (counts, shared_counts), runner.router_totals, plan.forest.computed_tokens, len(plan.ranks[0]))


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
