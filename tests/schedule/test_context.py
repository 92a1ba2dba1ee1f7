"""Where K/V are under context parallelism: the choice, and the memory of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixflow.plan.context import ContextKV
from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.context import choose_context_kv, predicted_peaks
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.ops import Kind
from tests.plan.groups import batch_of

GATHER = MemoryModel(ModelShape.from_name("tiny"), context_parallel=4)
RING = replace(GATHER, context_kv=ContextKV.RING)
PREFIX, SUFFIX = 64, 16


@pytest.fixture(scope="module")
def plan() -> Plan:
    batch = batch_of(*([1] * (PREFIX + 1) + [10 * i, *range(2, 1 + SUFFIX)] for i in range(2, 5)))
    return build_plan(batch, PlanConfig(SUFFIX, token_multiple=8))


def test_shards_divide_what_is_kept_and_add_what_is_under_way() -> None:
    for name in ("kv_bytes_per_token", "kv_gradient_bytes_per_token"):
        assert 4 * getattr(RING, name) == getattr(GATHER, name)
    assert RING.kept_bytes_per_token == GATHER.kept_bytes_per_token - 3 * RING.kv_bytes_per_token
    assert GATHER.ring_bytes(8, Kind.BACKWARD) == 0
    of_layer = RING.kv_bytes_per_token // RING.shape.num_layers
    assert RING.ring_bytes(8, Kind.FORWARD) == 8 * 2 * of_layer
    # Gradients are fp32, K/V bf16: each of the three weighs two shards of K/V.
    assert RING.ring_bytes(8, Kind.BACKWARD) == 8 * (2 + 3 * 2) * of_layer
    assert replace(RING, pipeline_parallel=2).ring_bytes(8, Kind.FORWARD) == RING.ring_bytes(8, Kind.FORWARD)


def test_auto_gathers_while_that_fits(plan: Plan) -> None:
    gathered, sharded = (max(predicted_peaks(plan, memory).values()) for memory in (GATHER, RING))
    assert sharded < gathered
    for memory in (GATHER, RING):
        assert choose_context_kv(None, plan, memory, None).kv is ContextKV.GATHER
        assert choose_context_kv(None, plan, memory, gathered).kv is ContextKV.GATHER
        choice = choose_context_kv(None, plan, memory, gathered - 1)
        assert choice.kv is ContextKV.RING
        assert "budget" in choice.reason
        assert choose_context_kv(ContextKV.RING, plan, memory, 2 * gathered).kv is ContextKV.RING
        assert choose_context_kv(ContextKV.GATHER, plan, memory, 1).kv is ContextKV.GATHER
