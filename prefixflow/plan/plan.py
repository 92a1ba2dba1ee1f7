"""The plan of one step: forest, placement over data-parallel ranks, microbatches, and what reuse is worth.

Steps: (1) the forest of the batch (reuse off: every trajectory by itself; groups with a long common prefix merged where
that lowers the most loaded rank); (2) `auto` folds shared segments
that save less than they cost, then every root is a tree; (3) trees to ranks, a tree too large for one is split, unless the
caller has placed the trajectories; (4) segments longer than the token
budget, or costlier than a microbatch should be, are cut, where reuse is on; (5) microbatches per rank. Pure and deterministic: every rank builds the same plan, and `digest` tells.

Invariants (`Plan.assert_invariants`)
1. Every tree is on exactly one rank, on that of its trajectories where the caller has placed them.
2. Every trained token of every trajectory that is run is scored exactly once, at its own position, with its own
   label and temperature.
3. Microbatches keep their own invariants (`prefixflow.plan.microbatch`).
4. Ranks of one expert block have equal numbers of microbatches, of equal physical tokens where that is asked for.
5. Every trajectory is run with its own routes, wherever routes are replayed.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from prefixflow.forest import (
    Forest,
    RouteMismatch,
    RouteReport,
    build_forest,
    may_share,
    merged_labels,
    resolve_routes,
)
from prefixflow.plan import microbatch as packing
from prefixflow.plan.align import aligned_places
from prefixflow.plan.batch import MicrobatchArrays, microbatch_arrays, segment_row_counts
from prefixflow.plan.chunk import chunk_segments
from prefixflow.plan.cost import CostModel, Costs, MeasuredCosts
from prefixflow.plan.fold import fold_small_segments
from prefixflow.plan.joint import check_joint
from prefixflow.plan.microbatch import Microbatch, pack_microbatches, padded, placed
from prefixflow.plan.placement import Placement, check_given, place_as_given, place_forest, place_trees
from prefixflow.trajectories.types import Trajectory, check_trajectories

DEFAULT_MAX_TOKENS = 4096
MERGED_PREFIX_TOKENS = 64
"""Tokens on which groups must agree to be considered for one tree."""
MERGE_GAIN = 0.99
"""Load of the most loaded rank with merged groups over that without, at which merging is taken."""

SPREAD_SLACKS = (1.0, 1.1, 1.25, 1.5)
"""Largest cost of a microbatch over the mean, tried in turn, when a rank's work is spread over its block's number."""


class PrefixReuse(enum.Enum):
    """`AUTO`: where it saves more than it costs, per segment; `ON`: all there is; `OFF`: every trajectory whole."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class MergeGroups(enum.Enum):
    """`AUTO`: groups with a long common prefix in one tree where that lowers the most loaded rank; `OFF`: never."""

    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What a plan depends on besides the trajectories.

    max_tokens_per_microbatch counts physical tokens, padding included; token_multiple is what a microbatch is padded
    to (tensor-parallel size under sequence parallelism). With num_chunks model chunks on each of pipeline_size ranks
    (interleaved stages), dummies fill the number of microbatches to a multiple of pipeline_size. stage_layers: layers of
    each global stage (`layers_per_stage`), empty where all have the same number. `cost` are FLOPs, which give the bound;
    `measured` costs, where there are any, decide in their place.

    lead_window: backwards ahead that a pipeline's lead looks at, None for the default (`prefixflow.schedule.table`).

    expert_block: so many consecutive data-parallel ranks exchange tokens (`ParallelLayout.expert_block`); they get equal
    numbers of microbatches. equal_tokens: and of equal physical tokens, as the allgather dispatcher needs.
    route_mismatch: replay the trajectories' routes under this policy; None ignores them.
    """

    max_tokens_per_microbatch: int = DEFAULT_MAX_TOKENS
    data_parallel_size: int = 1
    token_multiple: int = 1
    pipeline_size: int = 1
    num_chunks: int = 1
    stage_layers: tuple[int, ...] = ()
    lead_window: int | None = None
    expert_block: int = 1
    equal_tokens: bool = False
    route_mismatch: RouteMismatch | None = None
    prefix_reuse: PrefixReuse = PrefixReuse.ON
    merge_groups: MergeGroups = MergeGroups.OFF
    cost: CostModel = field(default_factory=CostModel)
    measured: MeasuredCosts | None = None

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "token_multiple", "pipeline_size", "num_chunks", "expert_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"Plan: {name} is {getattr(self, name)}, expected at least 1.")
        if self.data_parallel_size % self.expert_block:
            raise ValueError(
                f"Plan: {self.data_parallel_size} data-parallel ranks do not divide into blocks of {self.expert_block} that "
                "exchange tokens; change the expert-parallel size or the number of processes."
            )
        if self.max_tokens_per_microbatch < self.token_multiple:
            raise ValueError(
                f"The token budget is {self.max_tokens_per_microbatch}, but a microbatch needs at least "
                f"{self.token_multiple} (one token per rank that shares it); raise "
                "--max-tokens-per-microbatch."
            )

    def block_of(self, data_rank: int) -> range:
        """The data-parallel ranks that exchange tokens with `data_rank`, itself included."""
        start = data_rank - data_rank % self.expert_block
        return range(start, start + self.expert_block)

    @property
    def deciding(self) -> Costs:
        """The costs that folding, cutting, placement and the choice of microbatch sizes go by."""
        return self.measured or self.cost

    @property
    def usable_tokens(self) -> int:
        """The budget, rounded down to whole multiples."""
        return self.max_tokens_per_microbatch - self.max_tokens_per_microbatch % self.token_multiple


@dataclass(frozen=True, slots=True)
class Plan:
    """`ranks[d]` are the microbatches of data-parallel rank d, in forward order; `trees[d]` its trees.

    rank_loads: predicted cost of each rank; baseline_rank_load: of the most loaded one without reuse. They are in the unit
    of the deciding costs. reuse_flops: of the forest before splits. split_loss_tokens, split_loss: positions, and their
    predicted cost, that are computed again because a tree was split over ranks.
    routes: of each trajectory, as it is run, int [positions, moe layers, top-k], with -1 for native routing; route_report: how
    they came about. Both None without replay.
    placement: the rank that the caller wanted for each trajectory; None where the plan chose. joint: the loss call of each
    (`prefixflow.plan.joint`); None where each has a loss of its own.
    """

    config: PlanConfig
    forest: Forest
    trees: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Microbatch, ...], ...]
    rank_loads: tuple[float, ...]
    baseline_rank_load: float
    baseline_flops: float
    reuse_flops: float
    num_fallback_groups: int
    split_loss_tokens: int
    split_loss: float
    digest: str
    routes: tuple[np.ndarray, ...] | None = field(default=None, compare=False, repr=False)
    route_report: RouteReport | None = None
    placement: tuple[int, ...] | None = None
    joint: tuple[int, ...] | None = None

    @property
    def bound(self) -> float:
        """Dense FLOPs over reuse FLOPs, splits left out: what reuse can win at most (design notes, 'Measuring')."""
        return self.baseline_flops / self.reuse_flops if self.reuse_flops else 1.0

    @property
    def predicted_speedup(self) -> float:
        """Predicted cost of the most loaded rank without reuse over that with it."""
        busiest = max(self.rank_loads, default=0.0)
        return self.baseline_rank_load / busiest if busiest else 1.0

    @property
    def num_microbatches(self) -> int:
        """Microbatches that hold a segment, over all ranks."""
        return sum(not m.is_dummy for rank in self.ranks for m in rank)

    @property
    def num_dummy_microbatches(self) -> int:
        return sum(m.is_dummy for rank in self.ranks for m in rank)

    def assert_invariants(self, trajectories: Sequence[Trajectory]) -> None:
        self.forest.assert_invariants()
        placed = sorted(tree for trees in self.trees for tree in trees)
        assert placed == list(range(self.forest.num_trees)), "a tree is lost or doubled"
        for start in range(0, len(self.ranks), self.config.expert_block):
            block = [self.ranks[rank] for rank in self.config.block_of(start)]
            assert len(set(map(len, block))) == 1, "ranks of an expert block have different numbers of microbatches"
            if self.config.equal_tokens:
                assert len({m.num_physical_tokens for rank in block for m in rank}) <= 1, "unequal physical tokens"
        scores = _Scores(trajectories)
        for number, (trees, rank) in enumerate(zip(self.trees, self.ranks, strict=True)):
            packing.assert_invariants(
                self.forest,
                rank,
                max_tokens=self.config.usable_tokens,
                multiple=self.config.token_multiple,
            )
            packed = {self.forest.segments[s].tree for m in rank for s in m.segments}
            with_segments = {s.tree for s in self.forest.segments}
            assert packed == set(trees) & with_segments, "a rank packs other trees than its own"
            held = {member for s in self.forest.segments if s.tree in trees for member in s.members}
            strangers = {member for member in held if self.placement and self.placement[member] != number}
            assert not strangers, f"rank {number} runs trajectories {sorted(strangers)} of other ranks"
            for m in rank:
                arrays = microbatch_arrays(self.forest, m, trajectories, self.routes)
                scores.add(m.id, arrays)
                self._assert_routes(m, arrays)
        scores.assert_once(self.forest.omitted)

    def _assert_routes(self, m: Microbatch, arrays: MicrobatchArrays) -> None:
        if self.routes is None or arrays.routes is None:
            assert arrays.routes is self.routes, f"microbatch {m.id}: routes"
            return
        replayed = np.sort(arrays.routes)
        for s, span in zip(m.segments, m.spans, strict=True):
            segment = self.forest.segments[s]
            for member in segment.members:
                own = np.sort(self.routes[member][segment.span.slice])
                assert (replayed[span.slice] == own).all(), f"microbatch {m.id}: trajectory {member} has other routes"
        assert (replayed[m.num_tokens :] == -1).all(), f"microbatch {m.id}: padding has routes"


class _Scores:
    """Counts how often each token of the batch is scored, and checks each score against its trajectory."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._trajectories = trajectories
        self._starts = np.cumsum([0, *(len(t.tokens) for t in trajectories)])
        self._tokens = np.concatenate([np.zeros(0, np.int64), *(t.tokens for t in trajectories)])
        self._temperatures = np.asarray([t.temperature for t in trajectories], np.float64)
        self._counts = np.zeros(self._starts[-1], np.int64)

    def add(self, microbatch: int, arrays: MicrobatchArrays) -> None:
        entry = self._starts[arrays.entry_trajectory] + arrays.entry_token
        np.add.at(self._counts, entry, 1)
        row, place = arrays.entry_row, arrays.row_index[arrays.entry_row]
        own = self._temperatures[arrays.entry_trajectory]
        for what, got, expected in (
            ("label", arrays.row_label[row], self._tokens[entry]),
            ("input token", arrays.tokens[place], self._tokens[entry - 1]),
            ("position", arrays.positions[place], arrays.entry_token - 1),
            ("temperature", arrays.row_temperature[row], own),
        ):
            assert (got == expected).all(), f"microbatch {microbatch}: a row has a wrong {what}"

    def assert_once(self, omitted: Collection[int]) -> None:
        for i, t in enumerate(self._trajectories):
            expected = np.zeros(len(t.tokens)) if i in omitted else t.loss_mask
            counts = self._counts[self._starts[i] : self._starts[i + 1]]
            assert (counts == expected).all(), f"trajectory {i}: a token is not scored once"


@dataclass(frozen=True, slots=True)
class Sharing:
    """What is shared and on which rank, before segments are cut and packed: what does not depend on the token budget.

    rows: head rows of each segment. The other figures are those of `Plan`.
    """

    forest: Forest
    rows: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]
    rank_loads: tuple[float, ...]
    baseline_rank_load: float
    baseline_flops: float
    reuse_flops: float
    num_fallback_groups: int
    split_loss_tokens: int
    split_loss: float
    routes: tuple[np.ndarray, ...] | None = field(default=None, compare=False, repr=False)
    route_report: RouteReport | None = None
    placement: tuple[int, ...] | None = None
    joint: tuple[int, ...] | None = None


def build_plan(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    *,
    omit: Collection[int] = (),
    placement: Sequence[int] | None = None,
    joint: Sequence[int] | None = None,
) -> Plan:
    """Plan one step.

    omit: trajectories that stay outside the backward problem (zero weight).
    placement: data-parallel rank that is to run each trajectory; nothing is shared across ranks then. None lets the plan choose.
    joint: number of the loss call of each trajectory (`prefixflow.plan.joint`). None: each has a loss of its own.

    Raises ValueError for a batch that is empty or repeats an id, when reuse is off and a trajectory is longer than the token
    budget, and where `placement` or `joint` cannot be kept.
    """
    sharing = share_prefixes(trajectories, config, omit=omit, placement=placement, joint=joint)
    return pack_plan(trajectories, config, sharing)


def share_prefixes(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    *,
    omit: Collection[int] = (),
    placement: Sequence[int] | None = None,
    joint: Sequence[int] | None = None,
) -> Sharing:
    """The forest of `trajectories` under the configuration's `prefix_reuse`, on its ranks; arguments, errors as `build_plan`."""
    check_trajectories(trajectories)
    if placement is not None:
        check_given(placement, len(trajectories), config.data_parallel_size)
    if joint is not None:
        check_joint(joint, trajectories, placement, config.data_parallel_size, omit)
    routes, report = None, None
    if config.route_mismatch is not None:
        routes, report = resolve_routes(trajectories, config.route_mismatch)
    given = None if placement is None else tuple(map(int, placement))
    return replace(
        _Sharer(trajectories, config, omit, routes, given).share(),
        routes=routes,
        route_report=report,
        placement=given,
        joint=None if joint is None else tuple(map(int, joint)),
    )


class _Sharer:
    """Finds what is shared: builds forests of one batch and places them."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        config: PlanConfig,
        omit: Collection[int],
        routes: Sequence[np.ndarray] | None,
        placement: Sequence[int] | None,
    ) -> None:
        self._trajectories = trajectories
        self._config = config
        self._omit = omit
        self._routes = routes
        self._placement = placement
        self._dense = build_forest(trajectories, dense_trees=None, omit=omit).with_tree_of_each_root()
        self._priced_dense = _Priced.of(self._dense, trajectories, config)

    def share(self) -> Sharing:
        if self._config.prefix_reuse is PrefixReuse.OFF:
            _refuse_long(self._dense, self._trajectories, self._config)
            return self._placed(self._dense, 0)
        own = self._shared(None)
        if self._config.merge_groups is MergeGroups.OFF:
            return own
        labels = merged_labels(self._trajectories, MERGED_PREFIX_TOKENS, omit=self._omit)
        if labels is None:
            return own
        merged = self._shared(labels)
        return merged if max(merged.rank_loads) <= MERGE_GAIN * max(own.rank_loads) else own

    def _shared(self, labels: Sequence[str] | None) -> Sharing:
        """Prefixes shared within groups, or within the labels that merge them; under a placement, within ranks too."""
        if labels is None and not may_share(self._trajectories, omit=self._omit):
            return self._placed(self._dense, 0)
        if self._placement is not None:
            groups = labels or [t.group for t in self._trajectories]
            labels = [f"{rank} {group}" for rank, group in zip(self._placement, groups, strict=True)]
        forest = build_forest(self._trajectories, omit=self._omit, labels=labels, routes=self._routes)
        if self._config.prefix_reuse is PrefixReuse.ON:
            return self._placed(forest.with_tree_of_each_root(), 0)
        folded = fold_small_segments(forest, self._config.deciding.sharing)
        groups_run_dense = _sharing_groups(forest, self._trajectories) - _sharing_groups(folded, self._trajectories)
        return self._placed(folded.with_tree_of_each_root(), len(groups_run_dense))

    def _placed(self, forest: Forest, num_fallback_groups: int) -> Sharing:
        config, num_ranks = self._config, self._config.data_parallel_size
        priced = self._priced_dense if forest is self._dense else _Priced.of(forest, self._trajectories, config)
        if self._placement is None:
            placement = place_forest(forest, priced.costs, num_ranks)
            baseline = Placement(self._dense, place_trees(self._priced_dense.costs, num_ranks))
        else:
            placement = place_as_given(forest, self._placement, num_ranks)
            baseline = place_as_given(self._dense, self._placement, num_ranks)
        priced_placed = priced
        if placement.forest is not forest:
            priced_placed = _Priced.of(placement.forest, self._trajectories, config)
        return Sharing(
            forest=placement.forest,
            rows=tuple(priced_placed.rows),
            trees=placement.trees,
            rank_loads=placement.loads(priced_placed.costs),
            baseline_rank_load=max(baseline.loads(self._priced_dense.costs)),
            baseline_flops=self._priced_dense.flops,
            reuse_flops=priced.flops,
            num_fallback_groups=num_fallback_groups,
            split_loss_tokens=placement.forest.computed_tokens - forest.computed_tokens,
            split_loss=sum(priced_placed.costs) - sum(priced.costs),
        )


@dataclass(frozen=True, slots=True)
class _Priced:
    """Head rows and training cost of each segment, as planning goes by it, and the FLOPs of all."""

    rows: list[int]
    costs: list[float]
    flops: float

    @classmethod
    def of(cls, forest: Forest, trajectories: Sequence[Trajectory], config: PlanConfig) -> _Priced:
        rows = segment_row_counts(forest, trajectories)
        costs = config.deciding.segment_costs(forest, rows)
        return cls(rows, costs, sum(costs) if config.measured is None else config.cost.forest_flops(forest, rows))


def pack_plan(
    trajectories: Sequence[Trajectory], config: PlanConfig, sharing: Sharing, *, max_cost: float = math.inf
) -> Plan:
    """Cut long segments and pack microbatches under the configuration's budget.

    max_cost: training cost of a microbatch on the stage that it costs most, as if all stages were as large as the
    largest; kept where cutting segments allows.
    """
    forest = sharing.forest
    rows = _weighed_rows(forest, sharing.rows, config)
    if config.prefix_reuse is not PrefixReuse.OFF:
        forest = chunk_segments(forest, config.usable_tokens, config.deciding, rows=rows, max_cost=max_cost)
    if forest is not sharing.forest:
        rows = _weighed_rows(forest, segment_row_counts(forest, trajectories), config)
    costs = config.deciding.segment_costs(forest, rows)
    pack = partial(
        pack_microbatches, forest, max_tokens=config.usable_tokens, multiple=config.token_multiple, costs=costs
    )
    packed = [pack(trees, max_cost=max_cost) for trees in sharing.trees]
    counts = [len(microbatches) for microbatches in packed]
    order = _block_order(counts, config.expert_block) if sharing.placement is None else range(len(counts))
    spread = [
        _spread_over(
            packed[rank],
            max(len(packed[order[p]]) for p in config.block_of(place)),
            costs,
            partial(pack, sharing.trees[rank]),
        )
        for place, rank in enumerate(order)
    ]
    ranks = _filled(spread, config)
    return Plan(
        config=config,
        forest=forest,
        trees=tuple(sharing.trees[rank] for rank in order),
        ranks=ranks,
        rank_loads=tuple(sharing.rank_loads[rank] for rank in order),
        baseline_rank_load=sharing.baseline_rank_load,
        baseline_flops=sharing.baseline_flops,
        reuse_flops=sharing.reuse_flops,
        num_fallback_groups=sharing.num_fallback_groups,
        split_loss_tokens=sharing.split_loss_tokens,
        split_loss=sharing.split_loss,
        digest=_digest(config, forest, ranks, trajectories, sharing),
        routes=sharing.routes,
        route_report=sharing.route_report,
        placement=sharing.placement,
        joint=sharing.joint,
    )


def _weighed_rows(forest: Forest, rows: Sequence[int], config: PlanConfig) -> list[float]:
    """Rows with which the cost of a segment on the whole model is that on its costliest stage, in `pack_plan`'s unit.

    That stage is the last, which has the whole head, or the largest where the last is smaller and rows are few.
    """
    layers = config.stage_layers or (1,) * (config.pipeline_size * config.num_chunks)
    total, largest = sum(layers), max(layers)
    missing = largest - layers[-1]
    row = config.deciding.forward.row + config.deciding.backward.row
    if not missing or not row:
        return [total / largest * n for n in rows]
    bodies = config.deciding.segment_costs(forest, [0] * len(rows))
    return [max(0.0, total * n - missing * body / row) / largest for n, body in zip(rows, bodies, strict=True)]


def _block_order(counts: Sequence[int], block: int) -> list[int]:
    """Ranks in the order that puts those of most alike numbers of microbatches into one block: fewest dummies."""
    return (
        sorted(range(len(counts)), key=lambda r: (-counts[r], r)) if 1 < block < len(counts) else [*range(len(counts))]
    )


def _spread_over(
    packed: tuple[Microbatch, ...],
    count: int,
    costs: Sequence[float],
    pack: Callable[..., tuple[Microbatch, ...]],
) -> tuple[Microbatch, ...]:
    """The same segments in more and smaller microbatches, up to `count`, in place of dummies.

    Ranks that exchange tokens run in step, so many even microbatches also wait less than few large ones.
    """
    if not 0 < len(packed) < count:
        return packed
    total = sum(costs[s] for m in packed for s in m.segments)
    candidates = (pack(max_cost=slack * total / count) for slack in SPREAD_SLACKS)
    return next((c for c in candidates if len(packed) < len(c) <= count), packed)


def _filled(packed: Sequence[Sequence[Microbatch]], config: PlanConfig) -> tuple[tuple[Microbatch, ...], ...]:
    """Line up every block of ranks and fill it with dummies, with interleaved stages to whole rounds."""
    multiple = config.pipeline_size if config.num_chunks > 1 else 1
    ranks: list[tuple[Microbatch, ...]] = []
    for start in range(0, len(packed), config.expert_block):
        block = packed[start : start + config.expert_block]
        places, count = aligned_places(block)
        count = -(-count // multiple) * multiple
        filled = [
            placed(microbatches, to, count, num_tokens=config.token_multiple)
            for microbatches, to in zip(block, places, strict=True)
        ]
        if config.equal_tokens:
            num_tokens = max((m.num_physical_tokens for rank in filled for m in rank), default=0)
            filled = [tuple(padded(m, num_tokens) for m in rank) for rank in filled]
        ranks.extend(filled)
    return tuple(ranks)


def _sharing_groups(forest: Forest, trajectories: Sequence[Trajectory]) -> set[str]:
    return {trajectories[m].group for segment in forest.segments if segment.is_shared for m in segment.members}


def _refuse_long(dense: Forest, trajectories: Sequence[Trajectory], config: PlanConfig) -> None:
    for segment in dense.segments:
        if len(segment) > config.usable_tokens:
            raise ValueError(
                f"Trajectory {trajectories[segment.source].id!r} has {len(segment)} positions, more than "
                f"the token budget of {config.max_tokens_per_microbatch}, and without prefix reuse "
                "trajectories are never cut; raise --max-tokens-per-microbatch or use "
                "--prefix-reuse on."
            )


def _digest(
    config: PlanConfig,
    forest: Forest,
    ranks: tuple[tuple[Microbatch, ...], ...],
    trajectories: Sequence[Trajectory],
    sharing: Sharing,
) -> str:
    """Hash of all that the ranks must agree on, tokens, loss masks and replayed routes too; compared before the first collective.

    Spans and slices of a microbatch follow from its segments.
    """
    segments = [(s.parent, s.tree, s.span.start, s.span.stop, s.members) for s in forest.segments]
    packed = [[(m.segments, m.num_physical_tokens, m.reads) for m in rank] for rank in ranks]
    digest = hashlib.sha256(repr((config, segments, sorted(forest.omitted), packed, sharing.joint)).encode())
    for trajectory in trajectories:
        # No vocabulary needs more than 32 bits, and half of the bytes are hashed in half of the time.
        digest.update(trajectory.tokens.astype(np.int32).data)
        digest.update(np.ascontiguousarray(trajectory.loss_mask).data)
        digest.update(repr(trajectory.temperature).encode())
    for array in sharing.routes or ():
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
