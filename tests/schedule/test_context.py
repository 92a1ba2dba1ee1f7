"""Where K/V are under context parallelism: the choice, and the memory of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixflow.plan.context import ContextKV
from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.context import ContextKVChoice, fit_with_context, unfitted_choice
from prefixflow.schedule.fit import SMALLEST_TOKEN_BUDGET, Judge, MemoryChoice, least_kept_bytes
from prefixflow.schedule.memory import MemoryModel, Recompute
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.peak import peak_bytes
from prefixflow.schedule.residency import ActivationPolicy
from prefixflow.schedule.search import rank_table
from prefixflow.testing.generate import two_level_groups
from tests.plan.groups import batch_of

GATHER = MemoryModel(ModelShape.from_name("tiny"), context_parallel=4)
RING = replace(GATHER, context_kv=ContextKV.RING)
PREFIX, SUFFIX = 640, 16
BATCH = batch_of(*([1] * (PREFIX + 1) + [10 * i, *range(2, 1 + SUFFIX)] for i in range(2, 5)))
CONFIG = PlanConfig(2 * SMALLEST_TOKEN_BUDGET, token_multiple=8)


def test_shards_divide_what_is_kept_and_add_what_is_under_way() -> None:
    for name in ("kv_bytes_per_token", "kv_gradient_bytes_per_token"):
        assert 4 * getattr(RING, name) == getattr(GATHER, name)
    assert GATHER.ring_bytes(8, Kind.BACKWARD) == 0
    of_layer = RING.kv_bytes_per_token // RING.shape.num_layers
    assert RING.ring_bytes(8, Kind.FORWARD) == 8 * 2 * of_layer
    # Gradients are fp32, K/V bf16: each of the three weighs two shards of K/V.
    assert RING.ring_bytes(8, Kind.BACKWARD) == 8 * (2 + 3 * 2) * of_layer
    assert replace(RING, pipeline_parallel=2).ring_bytes(8, Kind.FORWARD) == RING.ring_bytes(8, Kind.FORWARD)


def largest_peak(plan: Plan, memory: MemoryModel) -> int:
    """On the one rank, with everything kept on the device."""
    return max(peak_bytes(plan, 0, rank_table(plan, 0).rows[0], memory).values())


def test_auto_gathers_while_that_fits() -> None:
    def choice_of(budget_bytes: int, wanted: ContextKV | None = None) -> ContextKVChoice:
        fit, choice = fit_with_context(BATCH, CONFIG, GATHER, budget_bytes, wanted)
        assert fit.largest_bytes <= budget_bytes
        return choice

    # Of the smallest microbatches that are tried: the budget of tokens is halved before K/V are sharded.
    kept = PlanConfig(SMALLEST_TOKEN_BUDGET, token_multiple=8)
    gathered, sharded = (largest_peak(build_plan(BATCH, kept), memory) for memory in (GATHER, RING))
    assert sharded < gathered
    assert unfitted_choice(None).kv is ContextKV.GATHER
    assert choice_of(gathered).kv is ContextKV.GATHER
    assert choice_of(gathered - 1).kv is ContextKV.RING
    assert "budget" in choice_of(gathered - 1).reason
    assert choice_of(2 * gathered, ContextKV.RING).kv is ContextKV.RING
    with pytest.raises(ValueError, match="--memory-budget-gib"):
        choice_of(GATHER.state_bytes)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("recompute", Recompute)
def test_the_bound_of_what_is_kept_is_one(pp: int, recompute: Recompute) -> None:
    memory = replace(GATHER, pipeline_parallel=pp, recompute=recompute)
    for prefix_tokens in (SUFFIX, PREFIX):
        batch = two_level_groups(1, 3, prefix_tokens, (5, 20), seed=pp)
        config = replace(CONFIG, pipeline_size=pp)
        fit = Judge(batch, memory).fit(build_plan(batch, config), MemoryChoice())
        assert fit is not None
        assert memory.state_bytes <= least_kept_bytes(batch, config, memory) <= fit.largest_bytes
    assert least_kept_bytes(batch, config, memory) > memory.state_bytes


def test_what_cannot_fit_is_not_tried_and_the_choice_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of the search that tries everything."""
    memory = replace(GATHER, recompute=Recompute.FULL)
    kinds = []
    for seed in range(3):
        batch = two_level_groups(1, 3, (800, 1500), (5, 20), seed=seed)
        least = least_kept_bytes(batch, CONFIG, memory)
        for budget_bytes in (least - 1, 2 * least - memory.state_bytes):
            choices = []
            for bound in (least_kept_bytes, lambda *args: 0):
                monkeypatch.setattr("prefixflow.schedule.context.least_kept_bytes", bound)
                keep = (ActivationPolicy.KEEP,)
                choices.append(fit_with_context(batch, CONFIG, memory, budget_bytes, None, policies=keep))
            assert choices[0] == choices[1]
            kinds.append(choices[0][1].kv)
    assert kinds[::2] == [ContextKV.RING] * 3
    assert ContextKV.GATHER in kinds
