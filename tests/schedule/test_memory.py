"""Predicted memory of a rank: a layer tensor by tensor, a row operation by operation, and what parallelism divides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.plan.shapes import BUILTIN_SHAPES, ModelShape
from prefixflow.schedule.footprint import AttentionPart, LayerFootprint, LayerSizes, Ledger
from prefixflow.schedule.memory import LOGIT_CHUNK_ROWS, Holder, MemoryModel, Phase, Recompute
from prefixflow.schedule.peak import MemoryPoint, memory_curve, peak_bytes
from prefixflow.schedule.residency import ActivationPolicy, MemoryAction, MemoryPlan, Move
from prefixflow.schedule.table import build_table
from tests.plan.groups import batch_of

SHAPE = ModelShape.from_name("tiny")
MODEL = MemoryModel(SHAPE)
PLAIN = MemoryModel(SHAPE, element_bytes=4, fused=False)
# A prefix of 8 positions, three suffixes of 3 and one microbatch each.
PREFIX, SUFFIX = 8, 3
BATCH = batch_of(*([1] * (PREFIX + 1) + [10 * i, 2, 3] for i in range(2, 5)))
LAYER = LayerSizes(
    element=4,
    tokens=6,
    normed_tokens=6,
    key_tokens=6,
    hidden=128,
    query=128,
    key=64,
    channels=16,
    heads=8,
    ffn=512,
    parts=(AttentionPart(6, 6, causal=True),),
)


def plan_of(batch: list = BATCH, budget: int = PREFIX) -> Plan:
    return build_plan(batch, PlanConfig(budget))


def curve_of(plan: Plan, model: MemoryModel = MODEL, memory_plan: MemoryPlan | None = None) -> tuple[MemoryPoint, ...]:
    row = build_table([m.reads for m in plan.ranks[0]]).rows[0]
    return memory_curve(plan, 0, row, model, memory_plan=memory_plan)


def peaks(plan: Plan, model: MemoryModel = MODEL) -> dict[Phase, int]:
    row = build_table([m.reads for m in plan.ranks[0]]).rows[0]
    return peak_bytes(plan, 0, row, model)


def test_a_layer_by_hand() -> None:
    """Numbers a token that plain kernels keep: two norms with input, normalised and output; Q, K, V, output and logsumexp;
    sines and cosines of Q and of K; the gated projection, its activation, the gate plus zero, and the product."""
    ledger = Ledger()
    LayerFootprint(LAYER, ledger).forward(graph=True)
    assert ledger.now == 6 * 4 * (6 * 128 + 2 * 128 + 2 * 64 + 8 + 4 * 16 + 5 * 512)
    fused = Ledger()
    LayerFootprint(replace(LAYER, fused=True), fused).forward(graph=True)
    assert fused.now == 6 * 4 * (4 * 128 + 2 * 128 + 2 * 64 + 8 + 3 * 512)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("element", [2, 4, 8])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dead_tail": True},
        {"normed_tokens": 3},
        {"gathers_keys": True, "key_tokens": 12, "parts": (AttentionPart(6, 12, causal=False),)},
        {"parts": (AttentionPart(6, 6, causal=True), AttentionPart(4, 9, causal=False, blocks=2))},
        {"experts": (12, 4, 256), "router": 8},
    ],
)
def test_a_backward_frees_what_its_forward_kept(change: dict, fused: bool, element: int, selective: bool) -> None:
    ledger = Ledger()
    walk = LayerFootprint(replace(LAYER, fused=fused, element=element, **change), ledger)
    walk.forward(graph=True, selective=selective)
    assert ledger.now > 0
    walk.backward(selective=selective)
    assert ledger.now == 0
    walk.forward(graph=False)
    # The output took the input's place.
    assert ledger.now == 0


def test_curve_by_hand() -> None:
    """0F0 0F1 0B1 0F2 0B2 0B0: K/V until the last reader's backward, gK/gV from the first reader's to the writer's."""
    curve = curve_of(plan_of())
    assert [str(point.op) for point in curve] == ["0F0", "0F1", "0B1", "0F2", "0B2", "0B0"]
    assert "".join(point.phase.value for point in curve) == "ABBBBC"
    kv, gradient = MODEL.kv_bytes_per_token, MODEL.kv_gradient_bytes_per_token
    assert [point.keys_values // kv for point in curve] == [8, 8, 8, 8, 8, 0]
    assert curve[0].gradients == curve[1].gradients == 0
    assert [point.gradients // gradient for point in curve[3:]] == [8, 8, 8]
    # While the first reader's backward goes down the layers, they get their gradients one by one.
    assert 0 < curve[2].gradients <= 8 * gradient
    # A second tree after it finds nothing left behind.
    plan = plan_of([*BATCH, *batch_of([7, 8, 9], group="h")])
    alone = curve_of(plan_of(batch_of([7, 8, 9], group="h")))
    assert curve_of(plan)[-1].total_bytes == alone[-1].total_bytes
    # Context-parallel ranks that recompute attention take the writer's K/V from the cache once more.
    model = replace(MODEL, context_parallel=2, recompute=Recompute.FULL)
    plan = build_plan(BATCH, PlanConfig(PREFIX, token_multiple=2))
    assert [point.keys_values // kv for point in curve_of(plan, model)] == [8] * 6


def test_policies_take_dormant_activations_away() -> None:
    plan = plan_of()
    fetch = {5: (MemoryAction(Move.FETCH_ACTIVATIONS, 0, 0),)}
    plans = {
        ActivationPolicy.KEEP: MemoryPlan(),
        ActivationPolicy.RECOMPUTE: MemoryPlan({(0, 0): ActivationPolicy.RECOMPUTE}),
        ActivationPolicy.OFFLOAD: MemoryPlan({(0, 0): ActivationPolicy.OFFLOAD}, fetch),
    }
    curves = {policy: curve_of(plan, PLAIN, memory_plan) for policy, memory_plan in plans.items()}
    in_suffixes = {p: max(x.activations for x in c if x.phase is Phase.SUFFIX) for p, c in curves.items()}
    kept, again, away = in_suffixes.values()
    assert again == away < kept / 2
    offloaded = curves[ActivationPolicy.OFFLOAD]
    assert offloaded[0].offloaded == offloaded[1].host == offloaded[-1].host > 0
    # In its own backward it comes back layer by layer; what is computed again is there whole.
    last = [curves[policy][-1].total_bytes for policy in plans]
    assert last[2] < last[0] <= last[1]


def test_without_operations_there_is_the_state() -> None:
    plan = plan_of(batch_of([1]))
    assert peaks(plan) == dict.fromkeys(Phase, MODEL.state_bytes)


def test_a_flat_batch_has_only_suffixes() -> None:
    got = peaks(plan_of(batch_of([1, 2, 3], [4, 5, 6]), budget=2))
    assert got[Phase.PREFIX_FORWARD] == got[Phase.PREFIX_BACKWARD] == MODEL.state_bytes < got[Phase.SUFFIX]


def test_parallelism_divides_what_it_should() -> None:
    halves = replace(MODEL, tensor_parallel=2)
    stages = replace(MODEL, pipeline_parallel=2)
    for name in ("kv_bytes_per_token", "kv_gradient_bytes_per_token"):
        assert getattr(halves, name) == getattr(stages, name) == getattr(MODEL, name) // 2
    whole = MODEL.state(0)[Holder.WEIGHTS]
    assert sum(stages.state(rank)[Holder.WEIGHTS] for rank in range(2)) == whole
    uneven = replace(stages, stage_layers=(1, 3))
    assert sum(uneven.state(rank)[Holder.WEIGHTS] for rank in range(2)) == whole
    assert halves.logit_bytes(3) == MODEL.logit_bytes(3) // 2
    assert stages.logit_bytes(3) == MODEL.logit_bytes(3)
    sharded = replace(MODEL, optimizer_shards=4)
    assert sharded.state(0)[Holder.OPTIMIZER] == MODEL.state(0)[Holder.OPTIMIZER] // 4
    experts = replace(MODEL, shape=BUILTIN_SHAPES["tiny-moe"], expert_parallel=4)
    num_bytes = experts.state(0)[Holder.OPTIMIZER]
    routed_bytes = num_bytes - replace(experts, expert_optimizer_shards=2).state(0)[Holder.OPTIMIZER]
    assert routed_bytes == 12 * experts.shape.num_expert_parameters // 4 // 2
    whole_experts = replace(experts, optimizer_shards=2).state(0)[Holder.OPTIMIZER]
    assert whole_experts == (num_bytes + 2 * routed_bytes) // 2
    full = max(p.total_bytes for p in curve_of(plan_of(), replace(PLAIN, recompute=Recompute.FULL)))
    assert full < max(p.total_bytes for p in curve_of(plan_of(), PLAIN)) * 0.6


def test_logits_are_alive_in_chunks() -> None:
    assert MODEL.logit_bytes(10 * LOGIT_CHUNK_ROWS) == MODEL.logit_bytes(LOGIT_CHUNK_ROWS) > MODEL.logit_bytes(1)


def test_logits_are_kept_where_they_are_no_more_than_the_activations_of_mlps() -> None:
    """At four positions a layer's MLP has 4 * 3 * ffn numbers; a chunk is always there."""
    rows = 2 * LOGIT_CHUNK_ROWS
    (m,) = plan_of(batch_of([*range(rows + 1)]), rows).ranks[0]
    layer = m.num_physical_tokens * 3 * SHAPE.ffn_hidden_size * PLAIN.element_bytes
    vocabulary = 4 * layer // (rows * PLAIN.wide_bytes)
    four = replace(PLAIN, shape=replace(SHAPE, num_layers=4, vocab_size=vocabulary))
    assert four.keeps_logits(m, rows, 0)
    larger = replace(four, shape=replace(four.shape, vocab_size=vocabulary + 1))
    assert not larger.keeps_logits(m, rows, 0)
    assert larger.keeps_logits(m, LOGIT_CHUNK_ROWS, 0)
    assert not replace(four, recompute=Recompute.FULL).keeps_logits(m, rows, 0)
    assert not replace(four, pipeline_parallel=2).keeps_logits(m, rows, 1)
    for model, kept in ((four, rows), (larger, LOGIT_CHUNK_ROWS)):
        held = {point.logits for point in curve_of(plan_of(batch_of([*range(rows + 1)]), rows), model)}
        assert held <= {0, model.logit_bytes(kept, whole=True)}


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_key_value_gradients_are_at_least_fp32(element_bytes: int) -> None:
    model = replace(MODEL, element_bytes=element_bytes)
    assert model.kv_gradient_bytes_per_token == model.kv_bytes_per_token * max(4, element_bytes) // element_bytes
