"""Fold shared segments that save less than they cost into their children.

A shared segment of n tokens with k branches (children, and trajectories that end in it) saves (k - 1) n computed tokens
and costs a slice, and the merging of it into each token below that does not continue it directly. Folding is exact: each
branch gets the tokens itself. Decided from the leaves up, since a folded child gives its branches to its parent.
"""

from __future__ import annotations

from prefixflow.forest.forest import Forest, renumber
from prefixflow.plan.cost import UNMEASURED_SHARING, SharingOverhead
from prefixflow.ranges import Range


def fold_small_segments(forest: Forest, overhead: SharingOverhead = UNMEASURED_SHARING) -> Forest:
    """The forest without shared segments that save no more than they cost."""
    children = forest.children()
    ends = [_ending(forest, s, children[s]) for s in range(len(forest.segments))]
    folded = _choose(forest, children, ends, overhead)
    if not any(folded):
        return forest
    rows: list[tuple[int | None, int, Range, tuple[int, ...]]] = []
    roots = [s.id for s in forest.segments if s.parent is None]
    # (segment, parent row, first position); a folded segment hands its first position down.
    stack: list[tuple[int, int | None, int]] = [(root, None, 0) for root in reversed(roots)]
    while stack:
        index, parent, start = stack.pop()
        segment = forest.segments[index]
        span = Range(start, segment.span.stop)
        if folded[index]:
            if ends[index]:
                rows.append((parent, segment.tree, span, ends[index]))
            stack.extend((child, parent, start) for child in reversed(children[index]))
            continue
        rows.append((parent, segment.tree, span, segment.members))
        row = len(rows) - 1
        stack.extend((child, row, segment.span.stop) for child in reversed(children[index]))
    return Forest(renumber(rows), forest.num_trees, forest.lengths, forest.omitted)


def _choose(
    forest: Forest, children: list[list[int]], ends: list[tuple[int, ...]], overhead: SharingOverhead
) -> list[bool]:
    folded = [False] * len(forest.segments)
    num_branches = [1] * len(forest.segments)
    # Tokens below a segment, and those of its first branch, which stand right behind it and need no merging.
    below = [0] * len(forest.segments)
    first_run = [0] * len(forest.segments)
    for segment in reversed(forest.segments):
        index = segment.id
        below[index] = sum(below[c] + len(forest.segments[c]) for c in children[index])
        if children[index]:
            first = children[index][0]
            first_run[index] = len(forest.segments[first]) + first_run[first]
        if not segment.is_shared or not children[index]:
            continue
        branches = sum(num_branches[c] if folded[c] else 1 for c in children[index])
        num_branches[index] = branches + bool(ends[index])
        cost = overhead.segment_tokens + overhead.merge_tokens * (below[index] - first_run[index])
        folded[index] = (num_branches[index] - 1) * len(segment) <= cost
    return folded


def _ending(forest: Forest, index: int, children: list[int]) -> tuple[int, ...]:
    """Trajectories whose last position lies in segment `index`."""
    going_on = {m for child in children for m in forest.segments[child].members}
    return tuple(m for m in forest.segments[index].members if m not in going_on)
