"""The plan of a step: properties over random batches, reuse modes, digest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import build as building
from prefixflow.plan import plan as planning
from prefixflow.plan.cost import UNMEASURED_SHARING, CostModel
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import MergeGroups, Plan, PlanConfig, PrefixReuse, build_plan
from prefixflow.schedule.order import backward_order, forwards_needed, lead
from prefixflow.trajectories import Trajectory
from tests.plan.groups import (
    batch_of,
    batches,
    brute_force_positions,
    configs,
    omitted_of,
    trajectory,
)


def microbatch_depth(rank: tuple[Microbatch, ...]) -> int:
    """Microbatches on the longest root path."""
    depths: list[int] = []
    for m in rank:
        depths.append(1 if m.parent is None else depths[m.parent] + 1)
    return max(depths, default=0)


@settings(max_examples=100, deadline=None)
@given(batches(), configs(), st.data())
def test_any_plan_keeps_its_invariants(trajectories: list[Trajectory], config: PlanConfig, data: st.DataObject) -> None:
    omit = data.draw(omitted_of(trajectories))
    plan = build_plan(trajectories, config, omit=omit)
    plan.assert_invariants(trajectories)
    assert len(plan.ranks) == len(plan.trees) == config.data_parallel_size
    assert sum(m.num_tokens for rank in plan.ranks for m in rank) == plan.forest.computed_tokens
    if config.prefix_reuse is PrefixReuse.ON:
        once = plan.forest.computed_tokens - plan.split_loss_tokens
        assert once == brute_force_positions(trajectories, omit)
    for rank in plan.ranks:
        need = forwards_needed(backward_order([m.reads for m in rank]))
        assert lead(need) <= microbatch_depth(rank)


@settings(max_examples=40, deadline=None)
@given(batches(), configs())
def test_packing_never_deepens_a_tree(trajectories: list[Trajectory], config: PlanConfig) -> None:
    """A microbatch is at most as deep in microbatches as its segments are in segments."""
    plan = build_plan(trajectories, config)
    for rank in plan.ranks:
        longest = max((len(plan.forest.path(s.id)) for s in plan.forest.segments), default=0)
        assert microbatch_depth(rank) <= longest


@settings(max_examples=40, deadline=None)
@given(batches(), configs())
def test_off_is_the_dense_problem(trajectories: list[Trajectory], config: PlanConfig) -> None:
    off = replace(config, prefix_reuse=PrefixReuse.OFF)
    longest = max(len(t) - 1 for t in trajectories)
    if longest > off.usable_tokens:
        with pytest.raises(ValueError, match=rf"more than the token budget.*{'--prefix-reuse on'}"):
            build_plan(trajectories, off)
        return
    plan = build_plan(trajectories, off)
    plan.assert_invariants(trajectories)
    assert plan.forest.computed_tokens == sum(len(t) - 1 for t in trajectories)
    assert not any(m.reads or m.writes or m.cached for rank in plan.ranks for m in rank)
    assert plan.bound == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(batches(), configs(), st.data())
def test_digest_tells_plans_apart(trajectories: list[Trajectory], config: PlanConfig, data: st.DataObject) -> None:
    digest = build_plan(trajectories, config).digest
    assert build_plan(trajectories, config).digest == digest
    which = data.draw(st.integers(0, len(trajectories) - 1))
    place = data.draw(st.integers(0, len(trajectories[which]) - 1))
    tokens = trajectories[which].tokens.copy()
    tokens[place] += data.draw(st.sampled_from([1, 1000]))
    changed = [*trajectories]
    changed[which] = replace(trajectories[which], tokens=tokens)
    assert build_plan(changed, config).digest != digest


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens_per_microbatch": 41},
        {"data_parallel_size": 2},
        {"token_multiple": 2},
        {"prefix_reuse": PrefixReuse.AUTO},
        {"merge_groups": MergeGroups.AUTO},
        {"cost": CostModel(2.0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_digest_covers_the_config(change: dict) -> None:
    trajectories = batch_of([1, 2, 3, 4], [1, 2, 3, 5])
    config = PlanConfig(max_tokens_per_microbatch=40)
    assert build_plan(trajectories, config).digest != build_plan(trajectories, replace(config, **change)).digest


def test_digest_covers_mask_temperature_and_omission() -> None:
    config = PlanConfig()
    digests = {
        build_plan([trajectory([1, 2, 3], trained=trained, temperature=t)], config, omit=omit).digest
        for trained in ([1], [2], [1, 2])
        for t in (1.0, 0.5)
        for omit in ((), (0,))
    }
    assert len(digests) == 12


def two_level(prefix_tokens: int, suffix_tokens: int, size: int) -> list[Trajectory]:
    """Prompts of `prefix_tokens` positions shared by `size` responses, all of them trained."""
    prompt = [7] * (prefix_tokens + 1)
    return [
        trajectory(
            prompt + [100 + i] * suffix_tokens,
            name=str(i),
            trained=range(prefix_tokens + 1, prefix_tokens + 1 + suffix_tokens),
        )
        for i in range(size)
    ]


def flops_of(plan: Plan) -> tuple[float, float]:
    return plan.baseline_flops, sum(plan.rank_loads)


@pytest.mark.parametrize(("p", "s", "g"), [(50, 10, 8), (1, 30, 3), (400, 7, 5)])
@pytest.mark.parametrize("budget", [64, 1000])
def test_bound_is_the_two_level_formula(p: int, s: int, g: int, budget: int) -> None:
    """P shared positions, S positions and S head rows each; cutting the prefix changes no FLOP."""
    b, h, a = 1000.0, 17.0, 0.3
    config = PlanConfig(max_tokens_per_microbatch=budget, cost=CostModel(b, h, a))
    plan = build_plan(two_level(p, s, g), config)
    baseline = 3 * b * g * (p + s) + 3 * h * g * s + 3.5 * a * g * (p + s) ** 2 / 2
    reuse = 3 * b * (p + g * s) + 3 * h * g * s + 3.5 * a * (p * p / 2 + g * (s * p + s * s / 2))
    assert flops_of(plan) == pytest.approx((baseline, reuse), rel=1e-12)
    assert plan.bound == pytest.approx(baseline / reuse, rel=1e-12)


def test_predicted_speedup_is_of_the_busiest_ranks() -> None:
    """9 x 30 dense positions on two ranks, so 150 on one; the tree of 20 + 8 x 10 loses its 20 once more to a split.

    Five suffixes on one rank, three and the lone 30 on the other. The bound does not know of the split.
    """
    trajectories = [*two_level(20, 10, 8), *batch_of(range(31), group="alone")]
    plan = build_plan(trajectories, PlanConfig(data_parallel_size=2))
    assert sorted(plan.rank_loads) == [3 * 70, 3 * 80]
    assert (plan.split_loss_tokens, plan.split_loss) == (20, 60.0)
    assert plan.bound == pytest.approx(270 / 130)
    assert plan.predicted_speedup == pytest.approx(150 / 80)


def test_shared_rows_are_charged_once() -> None:
    """Both train the same token 2; the head runs one row for it, and two in the dense baseline."""
    trajectories = [
        trajectory([1, 2, 3], name="a", trained=[1]),
        trajectory([1, 2, 3], name="b", trained=[1]),
    ]
    plan = build_plan(trajectories, PlanConfig(cost=CostModel(1.0, 100.0)))
    assert flops_of(plan) == (2 * (3 * 2 + 300), 3 * 2 + 300)


@pytest.mark.parametrize("extra", [0, 1])
def test_auto_falls_back_where_sharing_saves_too_little(extra: int) -> None:
    """Two members and one shared segment: it saves as many tokens as it is long."""
    shared = int(UNMEASURED_SHARING.segment_tokens) + extra
    trajectories = [*two_level(shared, 3, 2), *batch_of([1, 2, 3], group="alone")]
    plan = build_plan(trajectories, PlanConfig(prefix_reuse=PrefixReuse.AUTO))
    plan.assert_invariants(trajectories)
    assert plan.num_fallback_groups == 1 - extra
    assert plan.forest.num_shared_segments == extra
    on = build_plan(trajectories, PlanConfig(prefix_reuse=PrefixReuse.ON))
    assert (on.num_fallback_groups, on.forest.num_shared_segments) == (0, 1)


def test_auto_decides_per_group() -> None:
    trajectories = [*two_level(5, 3, 2), *(replace(t, id=f"big-{t.id}", group="big") for t in two_level(500, 3, 2))]
    plan = build_plan(trajectories, PlanConfig(prefix_reuse=PrefixReuse.AUTO))
    assert plan.num_fallback_groups == 1
    assert {trajectories[s.source].group for s in plan.forest.segments if s.is_shared} == {"big"}


def test_auto_still_cuts_long_trajectories_of_dense_groups() -> None:
    trajectories = two_level(5, 300, 2)
    config = PlanConfig(max_tokens_per_microbatch=64, prefix_reuse=PrefixReuse.AUTO)
    plan = build_plan(trajectories, config)
    plan.assert_invariants(trajectories)
    assert plan.num_fallback_groups == 1
    assert max(len(s) for s in plan.forest.segments) <= 64


def test_off_refuses_a_long_trajectory_by_name() -> None:
    """65 positions do not fit 64; 64 do, and with multiples of 7 only 63 are usable."""
    off = PlanConfig(max_tokens_per_microbatch=64, prefix_reuse=PrefixReuse.OFF)
    assert build_plan([trajectory(range(65))], off).num_microbatches == 1
    with pytest.raises(ValueError, match=r"Trajectory 'long' has 65 positions.* 64"):
        build_plan([trajectory(range(66), name="long")], off)
    with pytest.raises(ValueError, match="has 64 positions"):
        build_plan([trajectory(range(65))], replace(off, token_multiple=7))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_tokens_per_microbatch": 3, "token_multiple": 4}, "needs at least 4"),
        ({"max_tokens_per_microbatch": 0}, "needs at least 1"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"token_multiple": 0}, "token_multiple is 0"),
    ],
)
def test_impossible_configs_are_refused(config: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PlanConfig(**config)


def test_a_batch_without_work_has_an_empty_plan() -> None:
    trajectories = [trajectory([1])]
    plan = build_plan(trajectories, PlanConfig(data_parallel_size=2))
    plan.assert_invariants(trajectories)
    assert (plan.num_microbatches, plan.bound, plan.predicted_speedup) == (0, 1.0, 1.0)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        build_plan([], PlanConfig())


def test_more_ranks_than_trees_leaves_ranks_without_microbatches() -> None:
    plan = build_plan(two_level(5, 3, 1), PlanConfig(data_parallel_size=3))
    assert [len(rank) for rank in plan.ranks] == [1, 0, 0]


@pytest.mark.parametrize("reuse", [PrefixReuse.AUTO, PrefixReuse.ON])
def test_a_batch_with_nothing_to_share_builds_no_trie(reuse: PrefixReuse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pair of tokens tells; the plan is the dense one."""
    trajectories = [*batch_of([1, 2, 3], [1, 3, 3], [2, 2, 3]), *batch_of([1, 2, 3], group="other")]
    monkeypatch.setattr(building, "_trie", None)
    plan = build_plan(trajectories, PlanConfig(prefix_reuse=reuse))
    assert plan.forest == build_plan(trajectories, PlanConfig(prefix_reuse=PrefixReuse.OFF)).forest
    assert plan.bound == 1.0
    with pytest.raises(TypeError):
        build_plan(batch_of([1, 2, 3], [1, 2, 4]), PlanConfig(prefix_reuse=reuse))


def with_system_prompt(num_groups: int, system_tokens: int, group_size: int = 2) -> list[Trajectory]:
    """Groups of `group_size` with prompts of 20 tokens and responses of 10 of their own, after one system prompt."""
    return [
        trajectory(
            [*range(system_tokens), *[1000 + g] * 20, *[2000 + i] * 10],
            name=f"{g}-{i}",
            group=str(g),
            advantage=10.0**g,
        )
        for g in range(num_groups)
        for i in range(group_size)
    ]


@settings(max_examples=60, deadline=None)
@given(batches(), configs(), st.integers(1, 3), st.data())
def test_merged_groups_keep_the_invariants(
    trajectories: list[Trajectory], config: PlanConfig, min_tokens: int, data: st.DataObject
) -> None:
    omit = data.draw(omitted_of(trajectories))
    own = build_plan(trajectories, config, omit=omit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MERGED_PREFIX_TOKENS", min_tokens)
        plan = build_plan(trajectories, replace(config, merge_groups=MergeGroups.AUTO), omit=omit)
    plan.assert_invariants(trajectories)
    assert max(plan.rank_loads) <= max(own.rank_loads)


@pytest.mark.parametrize(("system_tokens", "is_merged"), [(65, True), (64, True), (63, False)])
def test_groups_with_a_long_common_prefix_are_merged(system_tokens: int, is_merged: bool) -> None:
    """Four groups: merged, the system prompt's positions run once instead of four times (its last token differs)."""
    trajectories = with_system_prompt(4, system_tokens)
    config = PlanConfig(merge_groups=MergeGroups.AUTO)
    own = build_plan(trajectories, replace(config, merge_groups=MergeGroups.OFF))
    plan = build_plan(trajectories, config)
    plan.assert_invariants(trajectories)
    assert own.forest.num_trees == 4
    assert plan.forest.num_trees == (1 if is_merged else 4)
    saved = own.forest.computed_tokens - plan.forest.computed_tokens
    assert saved == (3 * (system_tokens - 1) if is_merged else 0)
    assert plan.digest != own.digest


def test_groups_are_not_merged_where_that_helps_no_rank() -> None:
    """Four groups on four ranks: each rank runs the system prompt anyway."""
    trajectories = with_system_prompt(4, 100)
    plan = build_plan(trajectories, PlanConfig(data_parallel_size=4, merge_groups=MergeGroups.AUTO))
    assert plan.forest.num_trees == 4
    assert plan.split_loss_tokens == 0


def test_merged_groups_are_spread_over_ranks() -> None:
    """Eight groups on two ranks: one system prompt each, and four groups each."""
    trajectories = with_system_prompt(8, 100)
    plan = build_plan(trajectories, PlanConfig(data_parallel_size=2, merge_groups=MergeGroups.AUTO))
    plan.assert_invariants(trajectories)
    assert plan.rank_loads == (3.0 * (99 + 4 * 40),) * 2
    assert plan.split_loss_tokens == 99
