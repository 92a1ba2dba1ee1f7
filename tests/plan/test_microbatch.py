"""Packing and attention slices: a depth-3 tree by hand under five budgets, packing rules, mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import Forest, build_forest
from prefixflow.plan import microbatch as packing
from prefixflow.plan.microbatch import Microbatch, assert_invariants, pack_microbatches
from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range
from prefixflow.schedule.order import backward_order, forwards_needed, lead
from tests.plan.groups import batch_of

# Segments: 0 = R 0:4, 1 = B 4:7 below R, 2 = b0 7:9 and 3 = b1 7:10 below B, 4 = C 4:6 below R.
TREE = build_forest(
    batch_of(
        [0, 1, 2, 3, 4, 5, 6, 7, 80, 81],
        [0, 1, 2, 3, 4, 5, 6, 7, 90, 91, 92],
        [0, 1, 2, 3, 4, 60, 61],
    )
)


def pack(budget: int, multiple: int = 1, forest: Forest = TREE) -> tuple[Microbatch, ...]:
    trees = range(forest.num_trees)
    packed = pack_microbatches(forest, trees, max_tokens=budget, multiple=multiple)
    usable = budget - budget % multiple
    assert_invariants(forest, packed, max_tokens=usable, multiple=multiple)
    return packed


def causal(start: int, stop: int) -> LocalSlice:
    return LocalSlice(Range(start, stop), Range(start, stop), causal=True)


def full(queries: tuple[int, int], keys: tuple[int, int]) -> LocalSlice:
    return LocalSlice(Range(*queries), Range(*keys), causal=False)


def cached(queries: tuple[int, int], *blocks: int) -> CachedSlice:
    return CachedSlice(Range(*queries), blocks)


def test_tree_is_as_drawn() -> None:
    assert [(s.parent, str(s.span)) for s in TREE.segments] == [
        (None, "0:4"),
        (0, "4:7"),
        (1, "7:9"),
        (1, "7:10"),
        (0, "4:6"),
    ]


def test_whole_tree_in_one_microbatch() -> None:
    (m,) = pack(14)
    assert m.segments == (0, 1, 2, 3, 4)
    assert m.local == (
        causal(0, 9),
        causal(9, 12),
        causal(12, 14),
        full((9, 14), (0, 4)),
        full((9, 12), (4, 7)),
    )
    assert (m.cached, m.reads, m.writes) == ((), (), ())


def test_cached_root_and_local_branch() -> None:
    root, rest = pack(10)
    assert (root.segments, root.writes) == ((0,), (0,))
    assert (rest.segments, rest.reads, rest.parent) == ((1, 2, 3, 4), (0,), 0)
    assert rest.local == (causal(0, 5), causal(5, 8), causal(8, 10), full((5, 8), (0, 3)))
    assert rest.cached == (cached((0, 10), 0),)


def test_a_leaf_joins_the_writer_it_reads() -> None:
    root, rest = pack(8)
    assert (root.segments, root.local) == ((0, 4), (causal(0, 6),))
    assert (rest.segments, rest.cached) == ((1, 2, 3), (cached((0, 8), 0),))


def test_cached_blocks_with_different_readers_are_separate_slices() -> None:
    root, rest = pack(7)
    assert (root.segments, root.local, root.writes) == ((0, 1), (causal(0, 7),), (0, 1))
    assert rest.segments == (2, 3, 4)
    assert rest.cached == (cached((0, 7), 0), cached((0, 5), 1))
    assert rest.local == (causal(0, 2), causal(2, 5), causal(5, 7))


def test_cached_run_with_the_same_readers_is_one_slice() -> None:
    root, branch, leaves = pack(6)
    assert (root.segments, branch.segments, leaves.segments) == ((0, 4), (1,), (2, 3))
    assert branch.cached == (cached((0, 3), 0),)
    assert leaves.cached == (cached((0, 5), 0, 1),)
    assert (leaves.reads, leaves.parent) == ((0, 1), 1)


def test_padding_attends_to_itself() -> None:
    """Budget 11 in multiples of 4 is 8: as above, with the first microbatch padded from 6 to 8."""
    root, rest = pack(11, multiple=4)
    assert (root.num_tokens, root.num_physical_tokens) == (6, 8)
    assert root.local == (causal(0, 6), causal(6, 8))
    assert rest.local == pack(8)[1].local


def test_adjacent_keys_of_the_same_queries_are_joined() -> None:
    """A chain of two heavy pieces before a second child: one full slice over both, not two."""
    forest = build_forest(batch_of([0, 1, 2, 3, 7], [0, 1, 2, 3, 8], [0, 1, 2, 3, 8, 8]))
    forest = replace(
        forest,
        segments=(
            replace(forest.segments[0], span=Range(0, 1)),
            replace(forest.segments[0], id=1, parent=0, span=Range(1, 3)),
            *(replace(s, id=s.id + 1, parent=None if s.parent is None else s.parent + 1) for s in forest.segments[1:]),
        ),
    )
    forest.assert_invariants()
    (m,) = pack(100, forest=forest)
    assert [s for s in m.local if not s.causal] == [full((4, 6), (0, 3))]


def test_whole_small_trees_share_a_microbatch() -> None:
    trees = [batch_of([k, 1, 2], [k, 1, 3], group=f"g{k}") for k in range(6)]
    forest = build_forest([t for tree in trees for t in tree])
    assert [m.num_tokens for m in pack(9, forest=forest)] == [9, 9]


def test_bins_are_even() -> None:
    """6 4 4 3 in 10: best fit fills 10 and 7, which become 9 and 8."""
    forest = build_forest([t for k, n in enumerate((6, 4, 4, 3)) for t in chain(n, f"g{k}")])
    assert sorted(m.num_tokens for m in pack(10, forest=forest)) == [8, 9]


def test_costs_are_even_not_tokens() -> None:
    """6 4 4 3 tokens; the first costs as much as the others together."""
    forest = build_forest([t for k, n in enumerate((6, 4, 4, 3)) for t in chain(n, f"g{k}")])
    packed = pack_microbatches(forest, range(4), max_tokens=11, costs=[30.0, 10.0, 10.0, 10.0])
    assert sorted(m.segments for m in packed) == [(0,), (1, 2, 3)]


@pytest.mark.parametrize("max_cost", [40.0, 30.0, 29.0])
def test_no_microbatch_of_several_segments_costs_more_than_it_may(max_cost: float) -> None:
    """The first segment alone costs as much as allowed, or more: nothing joins it."""
    forest = build_forest([t for k, n in enumerate((6, 4, 4, 3)) for t in chain(n, f"g{k}")])
    costs = [30.0, 10.0, 10.0, 10.0]
    packed = pack_microbatches(forest, range(4), max_tokens=100, costs=costs, max_cost=max_cost)
    assert all(len(m.segments) == 1 or sum(costs[s] for s in m.segments) <= max_cost for m in packed)
    assert len(packed) == (2 if max_cost >= 30 else 3)


def test_a_segment_that_alone_costs_too_much_leaves_the_others_even() -> None:
    """50 is more than 40. Best fit of the others makes 40 and 20, evened out they are 30 and 30."""
    forest = build_forest([t for k in range(5) for t in chain(3, f"g{k}")])
    packed = pack_microbatches(forest, range(5), max_tokens=100, costs=[50.0, 30.0, 10.0, 10.0, 10.0], max_cost=40.0)
    assert [m.segments for m in packed] == [(0,), (1,), (2, 3, 4)]


def test_a_tree_that_costs_too_much_is_written() -> None:
    """14 tokens fit the budget; at a cost of 14 they do, at 10 the root is written as with a budget of 10."""
    whole = pack_microbatches(TREE, [0], max_tokens=100, max_cost=14.0)
    split = pack_microbatches(TREE, [0], max_tokens=100, max_cost=10.0)
    assert len(whole) == 1
    assert split == pack(10)


def test_evening_out_never_breaks_the_budget() -> None:
    """5 5 4 3 3 in 10: two full bins; the even spread would put 11 and 9."""
    forest = build_forest([t for k, n in enumerate((5, 5, 4, 3, 3)) for t in chain(n, f"g{k}")])
    assert sorted(m.num_tokens for m in pack(10, forest=forest)) == [10, 10]


def chain(num_positions: int, group: str) -> list[Any]:
    return batch_of(range(num_positions + 1), group=group)


@pytest.mark.parametrize("num_groups", [4, 16, 64])
def test_more_groups_do_not_deepen_the_lead(num_groups: int) -> None:
    """Joining the last suffixes of a group with the prefix of the next would chain all of them."""
    trajectories = [
        t
        for g in range(num_groups)
        for t in batch_of(*([*range(20), 100 + k] + [k] * 9 for k in range(3)), group=f"g{g}")
    ]
    forest = build_forest(trajectories)
    packed = pack(25, forest=forest)
    assert lead(forwards_needed(backward_order([m.reads for m in packed]))) == 2


def test_a_segment_longer_than_the_budget_is_our_own_error() -> None:
    with pytest.raises(AssertionError, match="exceeds the token budget 3"):
        pack(3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 60))
def test_any_two_bins_exceed_the_budget(sizes: list[int], budget: int) -> None:
    """So at most one bin is half empty before they are evened out."""
    units = [packing._Unit(range(i, i + 1), n, cost=1.0) for i, n in enumerate(sizes)]
    largest_first = sorted(units, key=lambda u: -u.load)
    bins = packing._best_fit(largest_first, budget)
    fills = sorted(sum(u.load for u in b) for b in bins)
    assert sorted(u.load for b in bins for u in b) == sorted(sizes)
    assert all(fill <= budget for fill in fills)
    assert len(fills) < 2 or fills[0] + fills[1] > budget


def off_by_one(piece: Any, **fields: tuple[int, int]) -> Any:
    changed = {
        name: Range(getattr(piece, name).start + a, getattr(piece, name).stop + b) for name, (a, b) in fields.items()
    }
    return replace(piece, **changed)


def edited(place: int, edit: Callable[[Microbatch], Microbatch]) -> Callable:
    def apply(packed: tuple[Microbatch, ...]) -> tuple[Microbatch, ...]:
        return (*packed[:place], edit(packed[place]), *packed[place + 1 :])

    return apply


def with_local(index: int, **fields: tuple[int, int]) -> Callable:
    def edit(m: Microbatch) -> Microbatch:
        local = list(m.local)
        local[index] = off_by_one(local[index], **fields)
        return replace(m, local=tuple(local))

    return edited(1, edit)


def with_cached(*slices: CachedSlice) -> Callable:
    return edited(1, lambda m: replace(m, cached=slices))


MUTANTS: dict[str, tuple[Callable, str]] = {
    "full keys end late": (with_local(3, keys=(0, 1)), "local keys"),
    "full keys end early": (with_local(3, keys=(0, -1)), "local keys"),
    "full keys begin late": (with_local(3, keys=(1, 0)), "local keys"),
    "full queries begin late": (with_local(3, queries=(1, 0)), "local keys"),
    "full queries end late": (with_local(3, queries=(0, 1)), "local keys"),
    "causal keys shifted": (with_local(1, keys=(1, 1)), "local keys"),
    "causal keys longer": (with_local(1, keys=(0, 1)), "causal slice"),
    "causal queries overlap": (with_local(1, queries=(-1, 0), keys=(-1, 0)), "causal queries"),
    "full slice lost": (edited(1, lambda m: replace(m, local=m.local[:-1])), "local keys"),
    "cached queries short": (with_cached(cached((0, 9), 0)), "blocks"),
    "cached block twice": (with_cached(cached((0, 10), 0, 0)), "blocks"),
    "cached block lost": (with_cached(), "does not write"),
    "reads lost": (edited(1, lambda m: replace(m, reads=())), "reads do not name"),
    "writes lost": (edited(0, lambda m: replace(m, writes=())), "does not write"),
    "written for nobody": (edited(1, lambda m: replace(m, writes=(2,))), "does not write"),
    "parent lost": (edited(1, lambda m: replace(m, parent=None)), "off its root path"),
    "packed twice": (
        edited(1, lambda m: replace(m, segments=(0, *m.segments), spans=(Range(0, 4), *m.spans))),
        "packed twice",
    ),
    "segment lost": (
        edited(1, lambda m: replace(m, segments=m.segments[:-1], spans=m.spans[:-1])),
        "is in no microbatch",
    ),
    "over the budget": (edited(1, lambda m: replace(m, num_physical_tokens=11)), "budget"),
    "swapped": (lambda packed: packed[::-1], "stands at place"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_invariants_see_the_mutant(name: str) -> None:
    mutate, reason = MUTANTS[name]
    packed = pack(10)
    with pytest.raises(AssertionError, match=reason):
        assert_invariants(TREE, mutate(packed), max_tokens=10, multiple=1)


def test_invariants_see_wrong_padding() -> None:
    (m,) = pack(14)
    with pytest.raises(AssertionError, match="padding"):
        assert_invariants(TREE, [m], max_tokens=16, multiple=4)


def test_invariants_see_a_writer_of_two_trees() -> None:
    forest = build_forest([*batch_of([0, 1, 2, 7, 7], [0, 1, 2, 8, 8]), *batch_of([9, 9], group="other")])
    writer, leaves, other = pack(4, forest=forest)
    assert other.segments == (3,)
    joined = replace(
        writer,
        segments=(0, 3),
        spans=(Range(0, 2), Range(2, 3)),
        num_physical_tokens=3,
        local=(causal(0, 2), causal(2, 3)),
    )
    with pytest.raises(AssertionError, match="several trees"):
        assert_invariants(forest, [joined, leaves], max_tokens=4, multiple=1)


def test_a_broken_slice_builder_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(slices: list[LocalSlice], new: LocalSlice) -> None:
        slices.append(replace(new, keys=Range(new.keys.start, new.keys.stop + 1)))

    monkeypatch.setattr(packing, "_append_full", off)
    with pytest.raises(AssertionError, match="local keys"):
        pack(14)
