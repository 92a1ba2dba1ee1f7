"""The generated shapes are what they claim to be."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby, pairwise

import numpy as np
import pytest

from prefixflow.forest import RouteMismatch, build_forest, resolve_routes
from prefixflow.testing.generate import (
    Style,
    edge_cases,
    mixed_workload,
    stepwise_chains,
    trees,
    two_level_groups,
    with_routes,
)
from prefixflow.trajectories import RouteShape, check_routes, check_trajectories


def by_group(items):
    groups = defaultdict(list)
    for item in items:
        groups[item.group].append(item)
    return groups


def num_common(left, right) -> int:
    size = min(len(left), len(right))
    return int(np.cumprod(left.tokens[:size] == right.tokens[:size]).sum())


def test_same_arguments_same_trajectories_other_seed_others():
    first, again, other = (mixed_workload(seed=seed) for seed in (4, 4, 5))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert all(a.advantages[0] == b.advantages[0] for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("style", [Style(), Style(32, True, True)])
def test_a_mixed_workload_is_a_valid_batch_of_contiguous_groups(style):
    items = mixed_workload(style=style)
    check_trajectories(items, vocab_size=style.vocab_size)
    runs = [group for group, _ in groupby(item.group for item in items)]
    assert len(runs) == len(set(runs))
    magnitudes = np.abs([item.advantages[0] for item in items if item.advantages[0]])
    assert magnitudes.max() / magnitudes.min() > 1e3
    long = [item for item in items if len(item) > 10]
    assert all((np.ptp(item.advantages) > 0) == style.per_token_advantages for item in long)
    assert all((item.old_logprobs is not None) == style.logprobs for item in items)


def test_groups_share_their_prompt():
    for members in by_group(two_level_groups(3, 4, 10, (3, 9))).values():
        assert len(members) == 4
        assert all(num_common(members[0], other) >= 10 for other in members)
        assert all(not item.loss_mask[:10].any() and item.loss_mask[10:].all() for item in members)


def test_chain_samples_are_strict_prefixes_that_train_their_end():
    for members in by_group(stepwise_chains(2, 4)).values():
        for left, right in pairwise(members):
            assert num_common(left, right) == len(left) < len(right)
            assert not right.loss_mask[: len(left)].any()
            assert right.loss_mask[-1]


def test_trees_are_deep_and_train_inner_segments():
    for members in by_group(trees(2, depth=4, branching=2, segment_tokens=5)).values():
        assert len(members) == 16
        depths = {num_common(members[0], other) // 5 for other in members[1:]}
        assert depths == {1, 2, 3, 4}
        assert all(item.num_trained == 20 for item in members)


def test_edge_cases_are_there():
    groups = by_group(edge_cases())
    identical = groups["identical"]
    assert all(np.array_equal(identical[0].tokens, item.tokens) for item in identical)
    longest, *others = groups["prefix"]
    assert all(num_common(longest, item) == len(item) < len(longest) for item in others)
    assert groups["empty"][1].num_trained == 0
    assert num_common(*groups["empty"]) == len(groups["empty"][1])
    assert groups["one-token"][0].num_positions == 0
    assert sum(item.num_trained for item in groups["all-masked"]) == 0
    assert all((item.advantages == 0).all() for item in groups["zero-advantage"])
    assert num_common(*groups["first-only"]) == 1
    assert len(groups["lone"]) == 1


@pytest.mark.parametrize(("conflicting", "missing"), [(0.0, 0.0), (0.25, 0.0), (0.0, 0.5)])
def test_routes_conflict_and_miss_as_asked(conflicting, missing):
    shape = RouteShape(3, 2, 8)
    items = with_routes(mixed_workload(), shape, seed=1, conflicting=conflicting, missing=missing)
    for item in items:
        check_routes(item, shape)
    num_shared = sum(len(s) for s in build_forest(items).segments if s.is_shared)
    report = resolve_routes(items, RouteMismatch.EXACT)[1]
    assert (report.num_positions, report.num_mismatched) == (num_shared, round(conflicting * num_shared))
    unknown = np.concatenate([np.asarray(item.routes)[:, 0, 0] < 0 for item in items])
    assert abs(unknown.mean() - missing) < 0.1
    assert (report.num_filled > 0) == (missing > 0)
