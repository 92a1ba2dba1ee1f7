"""Predicted memory of a rank: bytes by hand along a short table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.memory import LOGIT_CHUNK_ROWS, MemoryModel, Phase, memory_curve, peak_bytes
from prefixflow.schedule.table import build_table
from tests.plan.groups import batch_of

SHAPE = ModelShape.from_name("tiny")
MODEL = MemoryModel(SHAPE)
# A prefix of 8 positions, three suffixes of 3 and one microbatch each.
PREFIX, SUFFIX = 8, 3
BATCH = batch_of(*([1] * (PREFIX + 1) + [10 * i, 2, 3] for i in range(2, 5)))


def plan_of(batch: list = BATCH, budget: int = PREFIX) -> Plan:
    return build_plan(batch, PlanConfig(budget))


def peaks(plan: Plan, model: MemoryModel = MODEL) -> dict[Phase, int]:
    row = build_table([m.reads for m in plan.ranks[0]]).rows[0]
    return peak_bytes(plan, 0, row, model)


def test_peaks_by_hand() -> None:
    """Two suffixes share a microbatch of 6 positions, the third has its own of 3.

    A: the prefix alone. B: the backward of the larger suffix, with the prefix's activations and K/V and gK/gV. C: the
    prefix's backward, when K/V has gone with its last reader.
    """
    plan = plan_of()
    sizes = [m.num_tokens for m in plan.ranks[0]]
    assert sizes == [8, 6, 3]
    kept, working = MODEL.kept_bytes_per_token, MODEL.working_bytes_per_token
    kv, gradient = MODEL.kv_bytes_per_token, MODEL.kv_gradient_bytes_per_token
    got = {phase: size - MODEL.state_bytes for phase, size in peaks(plan).items()}
    assert got == {
        Phase.PREFIX_FORWARD: 8 * (kept + kv + working) + MODEL.logit_bytes(8),
        Phase.SUFFIX: 8 * (kept + kv + gradient) + 6 * (kept + working) + MODEL.logit_bytes(6),
        Phase.PREFIX_BACKWARD: 8 * (kept + gradient + working) + MODEL.logit_bytes(8),
    }


def test_curve_by_hand() -> None:
    """0F0 0F1 0B1 0F2 0B2 0B0: K/V until the last reader's backward, gK/gV from the first reader's to the writer's."""
    plan = plan_of()
    row = build_table([m.reads for m in plan.ranks[0]]).rows[0]
    curve = memory_curve(plan, 0, row, MODEL)
    assert [str(point.op) for point in curve] == ["0F0", "0F1", "0B1", "0F2", "0B2", "0B0"]
    assert "".join(point.phase.value for point in curve) == "ABBBBC"
    kept, kv, gradient = MODEL.kept_bytes_per_token, MODEL.kv_bytes_per_token, MODEL.kv_gradient_bytes_per_token
    assert [point.activations // kept for point in curve] == [8, 14, 14, 11, 11, 8]
    assert [point.keys_values // kv for point in curve] == [8, 8, 8, 8, 8, 0]
    assert [point.gradients // gradient for point in curve] == [0, 0, 8, 8, 8, 8]
    # A second tree after it finds nothing left behind.
    plan = plan_of([*BATCH, *batch_of([7, 8, 9], group="h")])
    last = memory_curve(plan, 0, build_table([m.reads for m in plan.ranks[0]]).rows[0], MODEL)[-1]
    assert (last.activations, last.keys_values, last.gradients) == (2 * kept, 0, 0)
    assert curve[1].working == 6 * MODEL.working_bytes_per_token + MODEL.logit_bytes(6)
    # Context-parallel ranks that recompute attention take the writer's K/V from the cache once more.
    model = replace(MODEL, context_parallel=2, recomputes_attention=True)
    assert [point.keys_values // kv for point in memory_curve(plan_of(), 0, row, model)] == [8] * 6


def test_without_operations_there_is_the_state() -> None:
    plan = plan_of(batch_of([1]))
    assert peaks(plan) == dict.fromkeys(Phase, MODEL.state_bytes)


def test_a_flat_batch_has_only_suffixes() -> None:
    got = peaks(plan_of(batch_of([1, 2, 3], [4, 5, 6]), budget=2))
    assert got[Phase.PREFIX_FORWARD] == got[Phase.PREFIX_BACKWARD] == MODEL.state_bytes < got[Phase.SUFFIX]


def test_parallelism_and_recomputation_divide_what_they_should() -> None:
    halves = replace(MODEL, tensor_parallel=2)
    stages = replace(MODEL, pipeline_parallel=2)
    for name in ("state_bytes", "kept_bytes_per_token", "kv_bytes_per_token", "kv_gradient_bytes_per_token"):
        assert getattr(halves, name) == getattr(stages, name) == getattr(MODEL, name) // 2
    assert halves.logit_bytes(3) == MODEL.logit_bytes(3) // 2
    assert stages.logit_bytes(3) == MODEL.logit_bytes(3)
    full = replace(MODEL, full_recompute=True)
    assert full.kept_bytes_per_token == SHAPE.num_layers * SHAPE.hidden_size * 2
    assert replace(full, tensor_parallel=2).kept_bytes_per_token == full.kept_bytes_per_token


def test_logits_are_alive_in_chunks() -> None:
    assert MODEL.logit_bytes(10 * LOGIT_CHUNK_ROWS) == MODEL.logit_bytes(LOGIT_CHUNK_ROWS) > MODEL.logit_bytes(1)


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_key_value_gradients_are_at_least_fp32(element_bytes: int) -> None:
    model = replace(MODEL, element_bytes=element_bytes)
    assert model.kv_gradient_bytes_per_token == model.kv_bytes_per_token * max(4, element_bytes) // element_bytes
