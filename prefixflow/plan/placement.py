"""Place trees on data-parallel ranks, and split a tree that is too large for one.

Strategy
1. Whole trees: largest first, each to the least loaded rank; then moves and swaps away from the most loaded rank for as
   long as they help. If that leaves no rank 5 % above the mean, it is taken: nothing is lost.
2. Else trees larger than a rank's fair share are cut into *runs* of trajectories that are neighbours in depth-first order
   (each at the node, among those in reach, that loses least saving), and runs are placed like trees. Runs of one tree
   on one rank are joined again.
3. Else contiguous depth-first cuts of the whole forest, as even as a search for the smallest largest load makes them.
The lowest largest load wins; among those within 2 % of it, the least work is repeated.

Where the caller has placed the trajectories, their trees go where they are told, and nothing is split or moved.

A split computes the shared path above it on both sides. The pieces are trees of their own from then on.

Invariants
1. Every trajectory that is run is on exactly one rank, and so is every tree of the split forest.
2. Only what ranks share is repeated: the positions of every trajectory stay covered exactly once (`Forest`).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from prefixflow.forest.forest import Forest, renumber
from prefixflow.ranges import Range

EVEN = 1.001
"""Largest load over the mean below which moves and swaps stop."""
BALANCED = 1.05
"""Largest load over the mean that needs no split."""
NEARLY_BEST = 1.02
SPLITS_PER_SHARE = (1, 2, 4, 8)
"""Trial sizes of the runs of a split tree: a rank's fair share divided by these."""
SLACK = 0.75
"""A run may be cut this early where that loses less."""
SEARCH_STEPS = 24


def place_trees(loads: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Tree ids per rank, each in ascending order; `loads[i]` is the predicted cost of tree i.

    Every tree has a home, those without work too; a rank may be left without any.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for tree in sorted(range(len(loads)), key=lambda t: (-loads[t], t)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(tree)
        heapq.heappush(heap, (load + loads[tree], rank))
    _improve(loads, ranks)
    return tuple(tuple(sorted(trees)) for trees in ranks)


def _improve(loads: Sequence[float], ranks: list[list[int]]) -> None:
    """Move or swap trees from the most loaded rank while that lowers it, until it is as good as even."""
    totals = [sum(loads[t] for t in trees) for trees in ranks]
    even = EVEN * sum(totals) / len(ranks)
    for _ in range(4 * len(loads)):
        heavy = max(range(len(ranks)), key=lambda r: totals[r])
        if totals[heavy] <= even:
            return
        change = max(
            (_best_exchange(loads, ranks, totals, heavy, light) for light in range(len(ranks)) if light != heavy),
            default=None,
        )
        if change is None or change[0] <= 1e-9 * totals[heavy]:
            return
        _, light, out, back = change
        ranks[heavy].remove(out)
        ranks[light].append(out)
        if back >= 0:
            ranks[light].remove(back)
            ranks[heavy].append(back)
        moved = loads[out] - (loads[back] if back >= 0 else 0.0)
        totals[heavy] -= moved
        totals[light] += moved


def _best_exchange(
    loads: Sequence[float], ranks: Sequence[Sequence[int]], totals: Sequence[float], heavy: int, light: int
) -> tuple[float, int, int, int]:
    """(gain, `light`, tree that leaves `heavy`, tree that comes back or -1); gain is by how much the larger one drops."""
    gap = totals[heavy] - totals[light]
    offers = sorted([(0.0, -1), *((loads[t], t) for t in ranks[light])])
    best = (0.0, light, -1, -1)
    for out in ranks[heavy]:
        place = bisect.bisect_left(offers, (loads[out] - gap / 2, -1))
        for load, back in offers[max(0, place - 1) : place + 1]:
            moved = loads[out] - load
            best = max(best, (min(moved, gap - moved), light, out, back))
    return best


@dataclass(frozen=True, slots=True)
class Placement:
    """`forest` with its split trees apart, and the trees of each rank."""

    forest: Forest
    trees: tuple[tuple[int, ...], ...]

    def loads(self, costs: Sequence[float]) -> tuple[float, ...]:
        """Of each rank; `costs[s]` is the predicted cost of segment s of `forest`."""
        rank_of = {tree: rank for rank, trees in enumerate(self.trees) for tree in trees}
        loads = [0.0] * len(self.trees)
        for segment, cost in zip(self.forest.segments, costs, strict=True):
            loads[rank_of[segment.tree]] += cost
        return tuple(loads)


def check_given(given: Sequence[int], num_trajectories: int, num_ranks: int) -> None:
    """Raise ValueError where `given` is no placement of so many trajectories on so many ranks."""
    if len(given) != num_trajectories:
        raise ValueError(
            f"placement: expected a data-parallel rank for each of {num_trajectories} trajectories, got {len(given)}."
        )
    outside = [rank for rank in given if not 0 <= rank < num_ranks]
    if outside:
        raise ValueError(
            f"placement: expected data-parallel ranks from 0 to {num_ranks - 1}, got {outside[0]}; set data_parallel_size in "
            "PlanConfig to the number of ranks that the batch lies on."
        )


def place_as_given(forest: Forest, given: Sequence[int], num_ranks: int) -> Placement:
    """Each tree on the rank `given[i]` that its trajectories i are to run on; none may hold those of two."""
    trees: list[list[int]] = [[] for _ in range(num_ranks)]
    for segment in forest.segments:
        ranks = {given[member] for member in segment.members}
        assert len(ranks) == 1, f"{segment} is shared by ranks {sorted(ranks)}"
        if segment.parent is None:
            trees[ranks.pop()].append(segment.tree)
    return Placement(forest, tuple(map(tuple, trees)))


def place_forest(forest: Forest, costs: Sequence[float], num_ranks: int) -> Placement:
    """Place `forest` on ranks; `costs[s]` is the predicted cost of segment s.

    The forest comes back unchanged unless a tree is split.
    """
    loads = [0.0] * forest.num_trees
    for segment, cost in zip(forest.segments, costs, strict=True):
        loads[segment.tree] += cost
    trees = place_trees(loads, num_ranks)
    fair = sum(loads) / num_ranks
    if max(sum(loads[t] for t in rank) for rank in trees) <= BALANCED * fair:
        return Placement(forest, trees)
    walk = _Walk.of(forest, costs)
    home = {t: rank for rank, placed in enumerate(trees) for t in placed}
    candidates = [[home[t] for t in walk.trees]]
    candidates += [_place_runs(walk, loads, fair, fair / parts, num_ranks) for parts in SPLITS_PER_SHARE]
    candidates.append(_contiguous(walk, fair, num_ranks))
    totals = [walk.rank_loads(ranks, num_ranks) for ranks in candidates]
    lowest = min(map(max, totals))
    chosen = min((i for i, t in enumerate(totals) if max(t) <= NEARLY_BEST * lowest), key=lambda i: (sum(totals[i]), i))
    if chosen == 0:
        return Placement(forest, trees)
    return _split(forest, dict(zip(walk.members, candidates[chosen], strict=True)), num_ranks)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Trajectories that are run, in depth-first order.

    trees[i]: tree of the i-th. path[i]: cost of its whole root path. shared[i]: of the part it shares with the one
    before. Neighbours i..j together cost path[i] and path - shared of the others.
    """

    members: tuple[int, ...]
    trees: tuple[int, ...]
    path: tuple[float, ...]
    shared: tuple[float, ...]

    @classmethod
    def of(cls, forest: Forest, costs: Sequence[float]) -> _Walk:
        above: list[float] = []
        members, trees, path, shared = [], [], [], []
        open_path: list[int] = []
        low = 0.0
        for segment, cost in zip(forest.segments, costs, strict=True):
            while open_path and open_path[-1] != segment.parent:
                open_path.pop()
            reached = above[segment.parent] if segment.parent is not None else 0.0
            low = min(low, reached)
            open_path.append(segment.id)
            above.append(reached + cost)
            for member in segment.members:
                if segment.span.stop == forest.lengths[member]:
                    members.append(member)
                    trees.append(segment.tree)
                    path.append(above[-1])
                    shared.append(low)
                    low = above[-1]
        return cls(tuple(members), tuple(trees), tuple(path), tuple(shared))

    def rank_loads(self, ranks: Sequence[int], num_ranks: int) -> list[float]:
        """Cost of each rank when trajectory i is on `ranks[i]` and a rank computes what it shares once."""
        loads = [0.0] * num_ranks
        # What the next trajectory of a rank would share with its last one: the least that neighbours since shared.
        common = np.zeros(num_ranks)
        for rank, path, shared in zip(ranks, self.path, self.shared, strict=True):
            np.minimum(common, shared, out=common)
            loads[rank] += path - common[rank]
            common[rank] = path
        return loads

    def runs(self, places: Range, max_load: float) -> list[Range]:
        """Cut neighbours into runs of at most `max_load`, where a single trajectory allows it."""
        runs: list[Range] = []
        start = places.start
        while start < places.stop:
            stop = self._run_stop(start, places.stop, max_load)
            runs.append(Range(start, stop))
            start = stop
        return runs

    def _run_stop(self, start: int, end: int, max_load: float) -> int:
        load = self.path[start]
        stop = start + 1
        best = stop
        while stop < end and load + self.path[stop] - self.shared[stop] <= max_load:
            load += self.path[stop] - self.shared[stop]
            stop += 1
            if (
                stop < end
                and (load >= SLACK * max_load)
                and (self.shared[stop] <= self.shared[best] or best == start + 1)
            ):
                best = stop
        return stop if stop == end or load < SLACK * max_load else best


def _place_runs(walk: _Walk, loads: Sequence[float], fair: float, max_load: float, num_ranks: int) -> list[int]:
    """Ranks of the trajectories when trees above the fair share are cut into runs of at most `max_load`."""
    runs: list[Range] = []
    for tree in _stretches(walk.trees):
        runs += walk.runs(tree, max_load) if loads[walk.trees[tree.start]] > fair else [tree]
    run_loads = [
        walk.path[run.start] + sum(walk.path[i] - walk.shared[i] for i in range(run.start + 1, run.stop))
        for run in runs
    ]
    ranks = [0] * len(walk.members)
    for rank, placed in enumerate(place_trees(run_loads, num_ranks)):
        for run in placed:
            ranks[runs[run].slice] = [rank] * len(runs[run])
    return ranks


def _contiguous(walk: _Walk, fair: float, num_ranks: int) -> list[int]:
    """Ranks of the trajectories when each rank takes a run of the whole walk, by bisection on the largest load."""
    everything = Range(0, len(walk.members))
    low, high = fair, sum(walk.path)
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        fits = len(walk.runs(everything, middle)) <= num_ranks
        low, high = (low, middle) if fits else (middle, high)
    ranks = [0] * len(everything)
    for rank, run in enumerate(walk.runs(everything, high)):
        ranks[run.slice] = [min(rank, num_ranks - 1)] * len(run)
    return ranks


def _stretches(values: Sequence[int]) -> Iterable[Range]:
    """Ranges of equal neighbours."""
    start = 0
    for place in range(1, len(values) + 1):
        if place == len(values) or values[place] != values[start]:
            yield Range(start, place)
            start = place


def _split(forest: Forest, rank_of: Mapping[int, int], num_ranks: int) -> Placement:
    """One tree for each (tree, rank) that has trajectories; segments that several ranks need are repeated."""
    rows: list[tuple[int | None, int, Range, tuple[int, ...]]] = []
    trees: list[list[int]] = [[] for _ in range(num_ranks)]
    first = 0
    num_trees = 0
    for tree in range(forest.num_trees):
        last = first
        while last < len(forest.segments) and forest.segments[last].tree == tree:
            last += 1
        needed = {rank_of[m] for s in range(first, last) for m in forest.segments[s].members}
        for rank in sorted(needed) or [0]:
            _restrict(forest, Range(first, last), partial(_is_on, rank_of, rank), num_trees, rows)
            trees[rank].append(num_trees)
            num_trees += 1
        first = last
    return Placement(Forest(renumber(rows), num_trees, forest.lengths, forest.omitted), tuple(map(tuple, trees)))


def _is_on(rank_of: Mapping[int, int], rank: int, member: int) -> bool:
    return rank_of[member] == rank


def _restrict(
    forest: Forest,
    segments: Range,
    keeps: Callable[[int], bool],
    tree: int,
    rows: list[tuple[int | None, int, Range, tuple[int, ...]]],
) -> None:
    """Append the part of a tree that the kept trajectories need; a node that branches no more joins its child."""
    row_of: dict[int, int] = {}
    for index in range(segments.start, segments.stop):
        segment = forest.segments[index]
        members = tuple(filter(keeps, segment.members))
        if not members:
            continue
        parent = None if segment.parent is None else row_of[segment.parent]
        if parent is not None and rows[parent][3] == members:
            above, _, span, _ = rows[parent]
            rows[parent] = (above, tree, Range(span.start, segment.span.stop), members)
            row_of[index] = parent
            continue
        rows.append((parent, tree, segment.span, members))
        row_of[index] = len(rows) - 1
