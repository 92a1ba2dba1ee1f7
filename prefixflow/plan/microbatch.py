"""Pack segments into microbatches.

Words. *Load* of a segment: its tokens, or its share of the largest cost of a microbatch in tokens of the budget, whichever
is larger. A sum of loads within the budget is within both limits. *Cost*: work on the busiest pipeline stage.

Strategy, tree by tree
1. A segment is *heavy* when its subtree's load exceeds the budget. Heavy segments are writers: others read their K/V
   from the cache. (Segments longer than the budget have been cut before, `prefixflow.plan.chunk`.)
2. Top-down, a heavy segment joins its parent's microbatch if it fits, else one that a sibling opened, else opens its
   own.
3. A maximal subtree that is not heavy is a *unit*: it is packed whole, its inner sharing stays in the graph. Units with
   the same parent microbatch are packed together, at even cost; an underfull result joins a microbatch on the same root path.
4. Whole trees that fit the budget have no parent microbatch and may share one microbatch with other trees.

Invariants (`assert_invariants`)
1. Every segment is in exactly one microbatch, whose physical tokens are within the budget and a multiple of `multiple`.
2. The microbatches form a forest: m reads only microbatches on its own root path (`parent`), so packing never
   deepens a tree and never chains groups together; a microbatch that is read holds segments of one tree.
3. Ids are a depth-first pre-order, which is the forward order.
4. Slices cover each query's ancestors and itself exactly once (`prefixflow.plan.slices`).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from prefixflow.forest.forest import Forest, Segment
from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range

# Segments that cost `max_cost` together, up to rounding, share a microbatch.
ROUNDING = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A flat batch of tokens made of whole segments; `spans[i]` is where segment `segments[i]` lies in it."""

    id: int
    segments: tuple[int, ...]
    spans: tuple[Range, ...]
    num_physical_tokens: int
    parent: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    local: tuple[LocalSlice, ...]
    cached: tuple[CachedSlice, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of segments, without padding."""
        return self.spans[-1].stop if self.spans else 0

    @property
    def is_dummy(self) -> bool:
        """True for a microbatch of padding only, which fills the schedule."""
        return not self.segments

    def span_of(self, segment: int) -> Range:
        return self.spans[self.segments.index(segment)]


@dataclass(slots=True, eq=False)
class _Bin:
    """A microbatch being filled. `parent` is the deepest bin it reads."""

    tree: int
    parent: _Bin | None
    segments: list[int] = field(default_factory=list)
    load: float = 0.0
    children: list[_Bin] = field(default_factory=list)

    def add(self, segments: Iterable[int], load: float) -> None:
        self.segments.extend(segments)
        self.load += load


@dataclass(frozen=True, slots=True)
class _Unit:
    """A whole light subtree: a run of segment ids."""

    segments: range
    load: float
    cost: float


def pack_microbatches(
    forest: Forest,
    trees: Iterable[int],
    *,
    max_tokens: int,
    multiple: int = 1,
    costs: Sequence[float] | None = None,
    max_cost: float = math.inf,
) -> tuple[Microbatch, ...]:
    """Microbatches of `trees`, in forward order. Segments must not be longer than `max_tokens`.

    costs: of each segment, by default its tokens. A microbatch of several segments does not exceed `max_cost`.
    """
    budget = max_tokens - max_tokens % multiple
    costs = costs or [len(segment) for segment in forest.segments]
    by_tree: dict[int, list[Segment]] = {tree: [] for tree in sorted(set(trees))}
    for segment in forest.segments:
        if segment.tree in by_tree:
            by_tree[segment.tree].append(segment)
    sizes = _Sizes(costs, budget, ROUNDING * budget / max_cost)
    top: list[_Bin] = []
    whole_trees: list[_Unit] = []
    for tree, segments in by_tree.items():
        sizes.add_tree(segments)
        if len(segments) == 1 and len(segments[0]) <= budget:
            whole_trees.append(sizes.unit(segments[0].id, segments[0].id + 1))
            continue
        bins = _Tree(tree, segments, sizes)
        top.extend(bins.top)
        whole_trees.extend(bins.rootless_units)
    top.extend(_pack_units(whole_trees, budget, tree=-1, parent=None))
    return _finish(forest, top, multiple)


def placed(
    microbatches: Sequence[Microbatch], places: Sequence[int], count: int, *, num_tokens: int
) -> tuple[Microbatch, ...]:
    """`microbatches` at their `places` among `count`, with dummies of `num_tokens` padding at the others."""
    moved = {
        place: replace(
            m,
            id=place,
            parent=None if m.parent is None else places[m.parent],
            reads=tuple(sorted(places[read] for read in m.reads)),
        )
        for m, place in zip(microbatches, places, strict=True)
    }
    return tuple(moved[i] if i in moved else _dummy(i, num_tokens) for i in range(count))


def _dummy(index: int, num_tokens: int) -> Microbatch:
    padding = Range(0, num_tokens)
    return Microbatch(
        id=index,
        segments=(),
        spans=(),
        num_physical_tokens=num_tokens,
        parent=None,
        reads=(),
        writes=(),
        local=(LocalSlice(padding, padding, causal=True),),
        cached=(),
    )


def padded(microbatch: Microbatch, num_tokens: int) -> Microbatch:
    """`microbatch` with more padding, up to `num_tokens` physical tokens."""
    padding = Range(microbatch.num_tokens, num_tokens)
    own = tuple(piece for piece in microbatch.local if piece.queries.start < microbatch.num_tokens)
    if not len(padding):
        return microbatch
    return replace(microbatch, num_physical_tokens=num_tokens, local=(*own, LocalSlice(padding, padding, causal=True)))


class _Tree:
    """Packs one tree: writers top-down, then its units."""

    def __init__(self, tree: int, segments: list[Segment], sizes: _Sizes) -> None:
        self.tree = tree
        self.sizes = sizes
        self.budget = budget = sizes.budget
        self.top: list[_Bin] = []
        self.rootless_units: list[_Unit] = []
        self._bin_of: dict[int, _Bin] = {}
        units: dict[int, tuple[_Bin, list[_Unit]]] = {}
        inside = -1
        ends = _subtree_ends(segments)
        for segment in segments:
            if segment.id < inside:
                continue
            parent = None if segment.parent is None else self._bin_of[segment.parent]
            if sizes.subtree_load[segment.id] > budget:
                self._place_writer(segment, parent)
                continue
            inside = ends[segment.id]
            unit = sizes.unit(segment.id, inside)
            if parent is None:
                self.rootless_units.append(unit)
            else:
                units.setdefault(id(parent), (parent, []))[1].append(unit)
        leaves: list[_Bin] = []
        for parent, members in units.values():
            leaves.extend(_pack_units(members, budget, tree, parent))
        self._join_underfull(leaves)

    def _place_writer(self, segment: Segment, parent: _Bin | None) -> None:
        assert len(segment) <= self.budget, f"{segment} exceeds the token budget {self.budget}"
        siblings = self.top if parent is None else parent.children
        candidates = ([] if parent is None else [parent]) + siblings[-1:]
        load = self.sizes.load[segment.id]
        target = next((b for b in candidates if b.load + load <= self.budget), None)
        if target is None:
            target = _Bin(self.tree, parent)
            siblings.append(target)
        target.add([segment.id], load)
        self._bin_of[segment.id] = target

    def _join_underfull(self, leaves: list[_Bin]) -> None:
        """Merge each small leaf bin into the fullest one that has its parent on the root path and room."""
        hosts_of = _hosts_by_parent(leaves)
        smallest = min((b.load for hosts in hosts_of.values() for b in hosts), default=0)
        for leaf in sorted(leaves, key=lambda b: b.load):
            parent = leaf.parent
            assert parent is not None
            room = self.budget - leaf.load
            if room < smallest:
                continue
            hosts = [b for b in hosts_of[id(parent)] if b is not leaf and b.segments and b.load <= room]
            if not hosts:
                continue
            host = max(hosts, key=lambda b: b.load)
            host.add(leaf.segments, leaf.load)
            parent.children.remove(leaf)
            leaf.segments = []


def _hosts_by_parent(leaves: list[_Bin]) -> dict[int, list[_Bin]]:
    """By id of a bin: the leaves below it, at any depth, and the bin itself."""
    hosts: dict[int, list[_Bin]] = {}
    for leaf in leaves:
        node = leaf.parent
        while node is not None:
            hosts.setdefault(id(node), [node]).append(leaf)
            node = node.parent
    return hosts


def _pack_units(units: list[_Unit], budget: int, tree: int, parent: _Bin | None) -> list[_Bin]:
    """Few bins (best fit, largest first), then of costs as even as longest-processing-time makes them."""
    fitted = _best_fit(sorted(units, key=lambda u: (-u.load, u.segments.start)), budget)
    groups = _spread(sorted(units, key=lambda u: (-u.cost, u.segments.start)), len(fitted))
    if any(sum(unit.load for unit in group) > budget for group in groups):
        groups = fitted
    bins = [_Bin(tree, parent) for _ in groups]
    for target, group in zip(bins, groups, strict=True):
        for unit in group:
            target.add(unit.segments, unit.load)
    if parent is not None:
        parent.children.extend(bins)
    return bins


def _best_fit(units: Sequence[_Unit], budget: int) -> list[list[_Unit]]:
    """Each unit into the group with the least room that still holds it."""
    groups: list[list[_Unit]] = []
    rooms: list[tuple[float, int]] = []  # (room, group), ascending
    for unit in units:
        place = bisect.bisect_left(rooms, (unit.load, 0))
        if place == len(rooms):
            groups.append([])
            room, group = float(budget), len(groups) - 1
        else:
            room, group = rooms.pop(place)
        groups[group].append(unit)
        bisect.insort(rooms, (room - unit.load, group))
    return groups


def _spread(units: Sequence[_Unit], num_groups: int) -> list[list[_Unit]]:
    """Each unit into the group that costs least so far."""
    groups: list[list[_Unit]] = [[] for _ in range(num_groups)]
    heap = [(0.0, group) for group in range(num_groups)]
    for unit in units:
        cost, group = heap[0]
        groups[group].append(unit)
        heapq.heapreplace(heap, (cost + unit.cost, group))
    return groups


def _finish(forest: Forest, top: list[_Bin], multiple: int) -> tuple[Microbatch, ...]:
    """Number the bins in depth-first pre-order and derive reads, writes and slices."""
    order: list[_Bin] = []
    stack = sorted(top, key=lambda b: min(b.segments), reverse=True)
    while stack:
        current = stack.pop()
        current.segments.sort()
        order.append(current)
        stack.extend(sorted(current.children, key=lambda b: min(b.segments), reverse=True))
    number = {id(b): index for index, b in enumerate(order)}
    microbatch_of = {s: index for index, b in enumerate(order) for s in b.segments}
    drafts = [_slices(forest, b.segments, multiple) for b in order]
    read_blocks = {block for draft in drafts for c in draft.cached for block in c.blocks}
    return tuple(
        Microbatch(
            id=index,
            segments=tuple(b.segments),
            spans=draft.spans,
            num_physical_tokens=draft.num_physical_tokens,
            parent=None if b.parent is None else number[id(b.parent)],
            reads=tuple(sorted({microbatch_of[s] for c in draft.cached for s in c.blocks})),
            writes=tuple(s for s in b.segments if s in read_blocks),
            local=draft.local,
            cached=draft.cached,
        )
        for index, (b, draft) in enumerate(zip(order, drafts, strict=True))
    )


@dataclass(frozen=True, slots=True)
class _Draft:
    spans: tuple[Range, ...]
    num_physical_tokens: int
    local: tuple[LocalSlice, ...]
    cached: tuple[CachedSlice, ...]


def _slices(forest: Forest, segments: Sequence[int], multiple: int) -> _Draft:
    """Attention slices of a microbatch whose segments stand in pre-order."""
    spans: dict[int, Range] = {}
    offset = 0
    for s in segments:
        spans[s] = Range(offset, offset + len(forest.segments[s]))
        offset = spans[s].stop
    readers = _reader_ranges(forest, segments, spans)
    causal = _causal_runs(forest, segments, spans)
    local = [LocalSlice(run, run, causal=True) for run in causal]
    run = 0
    for s in segments:
        while spans[s].start >= causal[run].stop:
            run += 1
        # Descendants in the same causal run are masked there already; the rest attend in full.
        queries = Range(causal[run].stop, max(readers[s].stop, causal[run].stop))
        if len(queries):
            _append_full(local, LocalSlice(queries, spans[s], causal=False))
    cached: list[CachedSlice] = []
    for s in sorted(readers.keys() - spans.keys()):
        previous = cached[-1] if cached else None
        if previous is not None and previous.queries == readers[s] and forest.segments[s].parent == previous.blocks[-1]:
            cached[-1] = CachedSlice(previous.queries, (*previous.blocks, s))
        else:
            cached.append(CachedSlice(readers[s], (s,)))
    num_physical = -(-offset // multiple) * multiple
    if num_physical > offset:
        padding = Range(offset, num_physical)
        local.append(LocalSlice(padding, padding, causal=True))
    return _Draft(tuple(spans.values()), num_physical, tuple(local), tuple(cached))


def _reader_ranges(forest: Forest, segments: Sequence[int], spans: dict[int, Range]) -> dict[int, Range]:
    """For each segment here and each ancestor: the queries of its descendants here (itself included).

    In pre-order the descendants of a segment are adjacent, so the first and the last one bound them.
    """
    starts: dict[int, int] = {}
    stops: dict[int, int] = {}
    for s in segments:
        for node in _new_on_path(forest, s, starts):
            starts[node] = spans[s].start
    for s in reversed(segments):
        for node in _new_on_path(forest, s, stops):
            stops[node] = spans[s].stop
    return {node: Range(start, stops[node]) for node, start in starts.items()}


def _new_on_path(forest: Forest, segment: int, known: Container[int]) -> Iterator[int]:
    """`segment` and its ancestors up to the first known one, whose own ancestors are known too."""
    node: int | None = segment
    while node is not None and node not in known:
        yield node
        node = forest.segments[node].parent


def _causal_runs(forest: Forest, segments: Sequence[int], spans: dict[int, Range]) -> list[Range]:
    """Causal query ranges: a segment directly followed by its child continues the same run."""
    runs: list[Range] = []
    for place, s in enumerate(segments):
        if place and forest.segments[s].parent == segments[place - 1]:
            runs[-1] = Range(runs[-1].start, spans[s].stop)
        else:
            runs.append(spans[s])
    return runs


def _append_full(slices: list[LocalSlice], new: LocalSlice) -> None:
    """Append a full slice, joining adjacent keys that the same queries read."""
    last = slices[-1] if slices else None
    if last and not last.causal and last.queries == new.queries and last.keys.joins(new.keys):
        slices[-1] = LocalSlice(new.queries, Range(last.keys.start, new.keys.stop), causal=False)
    else:
        slices.append(new)


class _Sizes:
    """Loads by segment, and loads and costs summed over its subtree; a bin holds loads up to `budget`."""

    def __init__(self, costs: Sequence[float], budget: int, tokens_per_cost: float) -> None:
        self.budget = budget
        self.costs = costs
        self.tokens_per_cost = tokens_per_cost
        self.load = [0.0] * len(costs)
        self.subtree_load = [0.0] * len(costs)
        self.subtree_cost = list(costs)

    def unit(self, root: int, stop: int) -> _Unit:
        return _Unit(range(root, stop), self.subtree_load[root], self.subtree_cost[root])

    def add_tree(self, segments: Sequence[Segment]) -> None:
        for segment in reversed(segments):
            index, parent = segment.id, segment.parent
            # A segment that alone costs more than a microbatch should still fits one.
            self.load[index] = max(len(segment), min(self.costs[index] * self.tokens_per_cost, self.budget))
            self.subtree_load[index] += self.load[index]
            if parent is not None:
                self.subtree_load[parent] += self.subtree_load[index]
                self.subtree_cost[parent] += self.subtree_cost[index]


def _subtree_ends(segments: list[Segment]) -> dict[int, int]:
    """For each segment id one past the last id of its subtree."""
    ends = {segment.id: segment.id + 1 for segment in segments}
    for segment in reversed(segments):
        if segment.parent is not None:
            ends[segment.parent] = max(ends[segment.parent], ends[segment.id])
    return ends


def assert_invariants(forest: Forest, microbatches: Sequence[Microbatch], *, max_tokens: int, multiple: int) -> None:
    """Check the invariants at the top of this file; O(tokens), for tests and `--verify`."""
    home = {s: m.id for m in microbatches for s in m.segments}
    assert len(home) == sum(len(m.segments) for m in microbatches), "a segment is packed twice"
    trees = {forest.segments[s].tree for s in home}
    for segment in forest.segments:
        assert (segment.id in home) == (segment.tree in trees), f"{segment} is in no microbatch"
    read_blocks = {block for m in microbatches for c in m.cached for block in c.blocks}
    open_path: list[int] = []
    for index, m in enumerate(microbatches):
        assert m.id == index, f"microbatch {m.id} stands at place {index}"
        assert m.num_tokens <= m.num_physical_tokens <= max_tokens, f"microbatch {index}: budget"
        assert m.num_physical_tokens % multiple == 0, f"microbatch {index}: padding"
        while open_path and open_path[-1] != m.parent:
            open_path.pop()
        assert m.parent is None or open_path, f"microbatch {index} is not in pre-order"
        assert set(m.reads) <= set(open_path), f"microbatch {index} reads off its root path"
        read = {home[block] for c in m.cached for block in c.blocks}
        assert set(m.reads) == read, f"microbatch {index}: reads do not name the homes of its blocks"
        written = tuple(s for s in m.segments if s in read_blocks)
        assert m.writes == written, f"microbatch {index} does not write what others read"
        assert len({forest.segments[s].tree for s in m.segments}) == 1 or not m.writes, (
            f"microbatch {index} is read and holds segments of several trees"
        )
        open_path.append(index)
        _assert_slices(forest, m)


def _assert_slices(forest: Forest, m: Microbatch) -> None:
    causal = sorted(piece.queries for piece in m.local if piece.causal)
    assert all(len(p.queries) == len(p.keys) for p in m.local if p.causal), "causal slice"
    bounds = [0, *(queries.stop for queries in causal)]
    starts = [queries.start for queries in causal]
    tiled = starts == bounds[:-1] and bounds[-1] == m.num_physical_tokens
    assert tiled, f"microbatch {m.id}: causal queries"
    spans = dict(zip(m.segments, m.spans, strict=True))
    for s, span in spans.items():
        expected = set(forest.path(s)[:-1])
        for query in (span.start, span.stop - 1):
            keys = [
                key
                for piece in m.local
                if query in piece.queries
                for key in range(
                    piece.keys.start,
                    piece.keys.start + query - piece.queries.start + 1 if piece.causal else piece.keys.stop,
                )
            ]
            blocks = [b for piece in m.cached if query in piece.queries for b in piece.blocks]
            here = [a for a in expected if a in spans]
            wanted = [k for a in here for k in range(spans[a].start, spans[a].stop)]
            wanted += range(span.start, query + 1)
            assert sorted(keys) == sorted(wanted), f"microbatch {m.id}, query {query}: local keys"
            assert sorted(blocks) == sorted(expected - set(here)), f"microbatch {m.id}: blocks"
