"""Fold shared segments that save less than they cost into their children.

A shared segment of n tokens with k branches (children, and trajectories that end in it) saves (k - 1) n computed tokens
and costs a slice that every branch reads and merges. Folding is exact: each branch gets the tokens itself. Decided from
the leaves up, since a folded child gives its branches to its parent.
"""

from __future__ import annotations

from prefixflow.forest.forest import Forest, renumber
from prefixflow.ranges import Range

# What one more shared segment costs its readers, in tokens of work (measured: benchmarks/README.md).
SHARED_SEGMENT_OVERHEAD_TOKENS = 16


def fold_small_segments(forest: Forest, overhead_tokens: int = SHARED_SEGMENT_OVERHEAD_TOKENS) -> Forest:
    """The forest without shared segments that save at most `overhead_tokens`."""
    children = forest.children()
    ends = [_ending(forest, s, children[s]) for s in range(len(forest.segments))]
    folded = _choose(forest, children, ends, overhead_tokens)
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


def _choose(forest: Forest, children: list[list[int]], ends: list[tuple[int, ...]], overhead_tokens: int) -> list[bool]:
    folded = [False] * len(forest.segments)
    num_branches = [1] * len(forest.segments)
    for segment in reversed(forest.segments):
        if not segment.is_shared or not children[segment.id]:
            continue
        branches = sum(num_branches[c] if folded[c] else 1 for c in children[segment.id])
        num_branches[segment.id] = branches + bool(ends[segment.id])
        folded[segment.id] = (num_branches[segment.id] - 1) * len(segment) <= overhead_tokens
    return folded


def _ending(forest: Forest, index: int, children: list[int]) -> tuple[int, ...]:
    """Trajectories whose last position lies in segment `index`."""
    going_on = {m for child in children for m in forest.segments[child].members}
    return tuple(m for m in forest.segments[index].members if m not in going_on)
