"""Predicted work of operations: by hand, with coefficients orders of magnitude apart."""

from __future__ import annotations

import pytest

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.cost import OPERATION_OVERHEAD_TOKENS, CostModel
from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.schedule.ops import backward, forward
from prefixflow.schedule.predict import StageCosts
from prefixflow.schedule.table import build_table
from tests.plan.groups import batch_of

COST = CostModel(linear=1e6, head=1e3, attention=1.0)
# A prefix of 4 positions and two suffixes of 2 (the pair that leaves the prefix differs).
BATCH = batch_of([1, 1, 1, 1, 1, 5, 6], [1, 1, 1, 1, 1, 7, 8])


def costs(*layers: int) -> StageCosts:
    plan = build_plan(BATCH, PlanConfig(4, cost=COST))
    assert [m.num_tokens for m in plan.ranks[0]] == [4, 4]
    rows = segment_row_counts(plan.forest, BATCH)
    return StageCosts.of(plan.forest, plan.ranks[0], rows, COST, layers)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_operations_by_hand(num_stages: int) -> None:
    """Pairs: 4 * 4 / 2 of the prefix; 2 * 4 + 2 * 2 / 2 of each suffix. Each of the 8 positions is trained."""
    c = costs(*[3] * num_stages)
    overhead = OPERATION_OVERHEAD_TOKENS * 1e6 / num_stages
    for m, pairs in enumerate((8, 20)):
        last = num_stages - 1
        body, back = 4e6 + pairs, 2 * 4e6 + 2.5 * pairs
        assert c.of_operation(forward(m, last)) == pytest.approx(body / num_stages + 4e3 + overhead)
        assert c.of_operation(backward(m, last)) == pytest.approx(back / num_stages + 8e3 + overhead)
        if num_stages == 2:
            assert c.of_operation(forward(m, 0)) == pytest.approx(body / 2 + overhead)
            assert c.of_operation(backward(m, 0)) == pytest.approx(back / 2 + overhead)


def test_a_microbatch_costs_what_its_costliest_stage_does() -> None:
    c = costs(1, 1)
    assert c.microbatch_costs() == pytest.approx(
        [c.of_operation(forward(m, 1)) + c.of_operation(backward(m, 1)) for m in range(2)]
    )
    assert c.microbatch_costs()[0] > c.of_operation(forward(0, 0)) + c.of_operation(backward(0, 0)) + 1e4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_bottleneck_is_the_last_rank_without_overhead(num_ranks: int) -> None:
    training = 3 * 8e6 + 3.5 * 28
    assert costs(*[1] * num_ranks).bottleneck(num_ranks) == pytest.approx(training / num_ranks + 3 * 8e3)


def test_uneven_stages_cost_by_their_layers() -> None:
    c = costs(3, 1, 0)
    overhead = OPERATION_OVERHEAD_TOKENS * 1e6 / 3
    assert [c.of_operation(forward(0, stage)) - overhead for stage in range(3)] == pytest.approx(
        [0.75 * (4e6 + 8), 0.25 * (4e6 + 8), 4e3]
    )
    training, head = 3 * 8e6 + 3.5 * 28, 3 * 8e3
    assert c.bottleneck(3) == pytest.approx(0.75 * training)
    # Interleaved: chunks 0 and 2 on the first of two ranks, chunks 1 and 3 on the last.
    assert costs(0, 2, 1, 1).bottleneck(2) == pytest.approx(0.75 * training + head)


def test_the_bottleneck_of_one_stage_is_the_cost_of_the_forest() -> None:
    plan = build_plan(BATCH, PlanConfig(4, cost=COST))
    assert costs(1).bottleneck(1) == pytest.approx(sum(plan.rank_loads))


def test_a_timeline_of_one_stage_adds_up() -> None:
    total = costs(1).bottleneck(1) + 4 * OPERATION_OVERHEAD_TOKENS * 1e6
    assert costs(1).timeline(build_table([(), (0,)])).makespan == pytest.approx(total)
