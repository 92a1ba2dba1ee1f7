"""The forest: trajectories cut into segments so that every shared position stands once.

Words. *Position* t of a trajectory is the pair (token t, token t + 1): the token that is run and the token it
predicts. A trajectory of n tokens has n - 1 positions; its last token has no successor and is not run.

Invariants (`Forest.assert_invariants`)
1. Segments are in depth-first pre-order: a parent precedes its children, a subtree is one run of ids.
2. A segment starts where its parent stops (a root starts at 0), lies in one tree and has at least one position.
3. A segment's members are trajectories of its parent too; members of siblings are disjoint.
4. The segments of a trajectory form one root path and cover its positions exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefixflow.ranges import Range


@dataclass(frozen=True, slots=True)
class Segment:
    """A maximal run of positions with the same set of trajectories (or a piece of one, after chunking).

    `span` are positions of the trajectory (RoPE positions too); the tokens are those of `members[0]`.
    """

    id: int
    tree: int
    parent: int | None
    span: Range
    members: tuple[int, ...]

    @property
    def source(self) -> int:
        """Index of a trajectory whose tokens this segment has."""
        return self.members[0]

    @property
    def is_shared(self) -> bool:
        return len(self.members) > 1

    def __len__(self) -> int:
        return len(self.span)


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments of all trees, in pre-order; `lengths[i]` is the number of positions of trajectory i.

    Trajectories may stay outside (`omitted`): those of a single token, and those left out of the backward
    problem because all their rows have zero weight. They are counted, never run.
    """

    segments: tuple[Segment, ...]
    num_trees: int
    lengths: tuple[int, ...]
    omitted: frozenset[int] = frozenset()

    @property
    def logical_tokens(self) -> int:
        """Positions a dense trainer runs: the sum over the trajectories that are run."""
        return sum(n for i, n in enumerate(self.lengths) if i not in self.omitted)

    @property
    def computed_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_shared_segments(self) -> int:
        """Shared segments; the pieces of a segment that was cut count once."""
        return sum(s.is_shared and not self._continues(s) for s in self.segments)

    @property
    def reuse_ratio(self) -> float:
        return self.logical_tokens / self.computed_tokens if self.segments else 1.0

    @property
    def depth(self) -> int:
        """Segments on the longest root path, the pieces of a segment that was cut counted once; 0 without any."""
        depths: list[int] = []
        for segment in self.segments:
            above = 0 if segment.parent is None else depths[segment.parent]
            depths.append(above if self._continues(segment) else above + 1)
        return max(depths, default=0)

    def _continues(self, segment: Segment) -> bool:
        """True for a later piece of a cut segment: a branch or an end always changes the members."""
        return segment.parent is not None and self.segments[segment.parent].members == segment.members

    def children(self) -> list[list[int]]:
        """For each segment the ids of its children, in order."""
        children: list[list[int]] = [[] for _ in self.segments]
        for segment in self.segments:
            if segment.parent is not None:
                children[segment.parent].append(segment.id)
        return children

    def path(self, segment_id: int) -> tuple[int, ...]:
        """Ids from the root to `segment_id`, both included."""
        path = [segment_id]
        while (parent := self.segments[path[-1]].parent) is not None:
            path.append(parent)
        return tuple(reversed(path))

    def with_tree_of_each_root(self) -> Forest:
        """The same segments, each root with a tree of its own: what is not shared binds nothing together."""
        if [segment.tree for segment in self.segments if segment.parent is None] == [*range(self.num_trees)]:
            return self
        rows: list[tuple[int | None, int, Range, tuple[int, ...]]] = []
        num_trees = 0
        for segment in self.segments:
            num_trees += segment.parent is None
            rows.append((segment.parent, num_trees - 1, segment.span, segment.members))
        return replace(self, segments=renumber(rows), num_trees=num_trees)

    def assert_invariants(self) -> None:
        covered = [0] * len(self.lengths)
        taken: dict[tuple[int | None, int], int] = {}
        open_path: list[int] = []
        for index, segment in enumerate(self.segments):
            assert segment.id == index, f"segment {segment.id} stands at place {index}"
            assert len(segment) > 0, f"{segment} is empty"
            assert segment.members, f"{segment} is empty"
            while open_path and open_path[-1] != segment.parent:
                open_path.pop()
            if segment.parent is None:
                assert segment.span.start == 0, f"root {segment} starts late"
            else:
                assert open_path, f"{segment} does not follow its parent's subtree"
                parent = self.segments[segment.parent]
                assert parent.tree == segment.tree, f"{segment} leaves its parent's tree"
                assert parent.span.joins(segment.span), f"{segment} does not continue {parent}"
                assert set(segment.members) <= set(parent.members), f"{segment} gains members"
            open_path.append(index)
            for member in segment.members:
                sibling = taken.setdefault((segment.parent, member), index)
                assert sibling == index, f"trajectory {member} is in siblings {sibling} and {index}"
                assert covered[member] == segment.span.start, f"{segment} leaves a gap"
                covered[member] = segment.span.stop
        for member, (length, reached) in enumerate(zip(self.lengths, covered, strict=True)):
            expected = 0 if member in self.omitted else length
            assert reached == expected, f"trajectory {member}: {reached} of {expected} positions"


def renumber(segments: Sequence[tuple[int | None, int, Range, tuple[int, ...]]]) -> tuple[Segment, ...]:
    """Segments from (parent index, tree, span, members) rows that already stand in pre-order."""
    return tuple(
        Segment(index, tree, parent, span, members) for index, (parent, tree, span, members) in enumerate(segments)
    )
