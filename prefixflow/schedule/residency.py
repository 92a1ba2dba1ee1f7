"""Where cached K/V, their gradients and dormant activations are between the operations of one rank's row (pure).

Words. A *block* is one shared segment. On each stage its K/V and its gK/gV are two *entries*, with uses of their own:

    operation   K/V                                        gK/gV
    F(m)        reads those of m's path, writes m's own    -
    B(m)        reads those of m's path                    adds to those of m's path, takes m's own

K/V are freed after the B of their last reader, gK/gV when the B of their writer has taken them. A *dormant* microbatch waits
longer between its F and its B than one of a flat 1F1B list on that stage does: prefixes, but also what a deep lead delays.

Strategy
1. Dormant microbatches get the activation policy that was asked for; all others keep their activations.
2. Entries are streamed where an operation alone needs more than the budget (`prefixflow.schedule.eviction`): with one
   pipeline stage every operation uses its whole path, so that nothing waits and nothing else would help.
3. Where the others exceed it together, some leave between two of their uses: right after
   the first of the two, so that the copy has the longest time, and back one operation before the second where the budget
   has room, else directly before it.
4. K/V whose writer's forward is cheaper than their transfer are dropped instead, and computed again directly before their
   next use. That needs the K/V of the writer's own path, which must be on the device then anyway, and the writer's stage input.
   Never where experts are spread over ranks: a forward runs their collectives, and the others do not run it.

Invariants (`prefixflow.schedule.replay`)
1. Bytes on the device never exceed the budget; what an operation uses is there when it runs.
2. Only what exists moves, once each way; at the end of the row nothing is left anywhere.
3. Activation policies depend on the table alone, so ranks that exchange tokens, which run one table, have the same.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prefixflow.plan.context import ContextKV
from prefixflow.plan.cost import MeasuredCosts
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan
from prefixflow.ranges import Range
from prefixflow.schedule.eviction import Gap, Streamable, choose_evictions, choose_streams, load_of
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.predict import StageCosts
from prefixflow.schedule.search import rank_table, stage_costs
from prefixflow.schedule.table import build_table

GIB = 1 << 30
STREAMED_LAYERS = 2
"""The one that is worked on, and the next on its way."""


class ActivationPolicy(enum.Enum):
    """What becomes of a microbatch's activations between its F and its B on one stage."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class Part(enum.Enum):
    """The two entries of a cached block."""

    KEYS_VALUES = "kv"
    GRADIENTS = "gkv"


class Move(enum.Enum):
    """EVICT, FETCH: a part of a block to the host, and back. STREAM, before the operation that makes it: a part of a block lives on
    the host from then on; an operation that uses it has a layer of it at a time on the device. DROP: K/V of a block are
    forgotten; RECOMPUTE: the forward of the microbatch that wrote them, on this stage, writes the dropped ones anew.
    FETCH_ACTIVATIONS: an offloaded microbatch's, before its B.
    """

    EVICT = "evict"
    FETCH = "fetch"
    STREAM = "stream"
    DROP = "drop"
    RECOMPUTE = "recompute"
    FETCH_ACTIVATIONS = "fetch activations"


@dataclass(frozen=True, slots=True)
class MemoryAction:
    """`move` of `target` on a global stage: a block with `part` for EVICT, FETCH and STREAM, a block for DROP, else a microbatch."""

    move: Move
    stage: int
    target: int
    part: Part | None = None

    def __str__(self) -> str:
        what = f" {self.part.value}" if self.part else ""
        return f"{self.move.value} {self.stage}:{self.target}{what}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one pipeline rank does for its memory during its row; an empty one does nothing.

    activations: by (stage, microbatch); KEEP where there is none. before, after: actions by an operation's index in the row,
    done in their order before it receives, and after it is done.
    """

    activations: Mapping[tuple[int, int], ActivationPolicy] = field(default_factory=dict)
    before: Mapping[int, tuple[MemoryAction, ...]] = field(default_factory=dict)
    after: Mapping[int, tuple[MemoryAction, ...]] = field(default_factory=dict)

    def written_again(self, stage: int) -> frozenset[int]:
        """Microbatches whose forward on a global stage runs again between operations, for the blocks that it wrote."""
        actions = (a for moves in (self.before, self.after) for done in moves.values() for a in done)
        return frozenset(a.target for a in actions if a.move is Move.RECOMPUTE and a.stage == stage)

    def __bool__(self) -> bool:
        return bool(self.activations or self.before or self.after)


@dataclass(frozen=True, slots=True)
class HostLink:
    """What decides between moving K/V and computing them again.

    Defaults: bytes_per_s of PCIe 5.0 x16, one direction (32 GT/s, 128b/130b coding: 63 GB/s). flops_per_s: 40 % of an NVIDIA
    H100 SXM's dense bf16 peak of 989 TFLOP/s (its data sheet), a usual utilisation of training; measured costs need none.
    """

    bytes_per_s: float = 63e9
    flops_per_s: float = 0.4 * 989e12


CPU_LINK = HostLink(bytes_per_s=1e10, flops_per_s=1e11)
"""Without a GPU a move is a copy in memory: orders of magnitude of a few cores."""


def link_of(memory: MemoryModel) -> HostLink:
    """Of the device that memory is predicted for."""
    return HostLink() if memory.fused else CPU_LINK


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """K/V or gK/gV of a block in the layers of one global stage."""

    stage: int
    block: int
    is_gradient: bool

    @property
    def part(self) -> Part:
        return Part.GRADIENTS if self.is_gradient else Part.KEYS_VALUES

    def action(self, move: Move) -> MemoryAction:
        return MemoryAction(move, self.stage, self.block, None if move is Move.DROP else self.part)


@dataclass(frozen=True, slots=True)
class EntryBytes:
    """Bytes of entries on one rank: per token and layer, times the layers of the stage."""

    block_tokens: tuple[int, ...]
    stage_layers: tuple[int, ...]
    kv_bytes: int
    kv_gradient_bytes: int

    @classmethod
    def of_plan(cls, plan: Plan, memory: MemoryModel) -> EntryBytes:
        config = plan.config
        num_layers = memory.shape.num_layers
        num_stages = config.pipeline_size * config.num_chunks
        whole = replace(memory, pipeline_parallel=1, context_kv=ContextKV.GATHER)
        # Shares of a sharded block differ by a token from rank to rank: the largest counts.
        num_shares = memory.context_parallel if memory.rotates_keys else 1
        return cls(
            block_tokens=tuple(-(-len(segment) // num_shares) for segment in plan.forest.segments),
            stage_layers=config.stage_layers or (num_layers // num_stages,) * num_stages,
            kv_bytes=whole.kv_bytes_per_token // num_layers,
            kv_gradient_bytes=whole.kv_gradient_bytes_per_token // num_layers,
        )

    def of(self, entry: Entry) -> int:
        return self._of_layers(entry, self.stage_layers[entry.stage])

    def streamed(self, entry: Entry) -> int:
        """On the device while an operation uses the entry a layer at a time."""
        return self._of_layers(entry, min(STREAMED_LAYERS, self.stage_layers[entry.stage]))

    def _of_layers(self, entry: Entry, num_layers: int) -> int:
        per_token = self.kv_gradient_bytes if entry.is_gradient else self.kv_bytes
        return self.block_tokens[entry.block] * num_layers * per_token


def cached_blocks(microbatch: Microbatch) -> tuple[int, ...]:
    """Blocks that a microbatch reads, each once, in order."""
    return tuple(dict.fromkeys(block for cached in microbatch.cached for block in cached.blocks))


def entries_used(microbatch: Microbatch, op: Op, *, reads_own: bool = False) -> list[Entry]:
    """Entries that must be on the device while an operation on `microbatch` runs, those that it makes included.

    reads_own: a backward reads what its microbatch wrote (`MemoryModel.reads_own_keys`).
    """
    path = cached_blocks(microbatch)
    used = [Entry(op.stage, block, False) for block in path]
    if op.kind is Kind.FORWARD:
        return used + [Entry(op.stage, block, False) for block in microbatch.writes]
    own = [Entry(op.stage, block, False) for block in microbatch.writes] if reads_own else []
    return used + own + [Entry(op.stage, block, True) for block in (*path, *microbatch.writes)]


def plan_memory(
    plan: Plan,
    data_rank: int,
    pipeline_rank: int,
    memory: MemoryModel,
    *,
    prefix_memory: ActivationPolicy | Mapping[tuple[int, int], ActivationPolicy] = ActivationPolicy.KEEP,
    kv_budget_bytes: int | None = None,
    host: HostLink | None = None,
    training: bool = True,
    row: Sequence[Op] | None = None,
) -> MemoryPlan:
    """What a pipeline rank of a data-parallel rank does for its memory during its row.

    prefix_memory: of the dormant microbatches, or of each (stage, microbatch). kv_budget_bytes: of K/V and gK/gV on the device,
    over all model chunks of the rank; None for no limit. host: by default that of the device. row: of the rank, where it is known. Without `training` the row has forwards only: no activations wait, K/V
    are freed after the last F that reads them, and none are dropped, since no stage input is kept.

    Raises:
        ValueError: one operation alone needs more than the budget, on any rank: all ranks raise the same.
    """
    if row is None:
        row = rank_table(plan, data_rank, training=training).rows[pipeline_rank]
    if not training or prefix_memory is ActivationPolicy.KEEP:
        prefix_memory = {}
    elif isinstance(prefix_memory, ActivationPolicy):
        prefix_memory = dict.fromkeys(dormant_microbatches(plan, row, pipeline_rank), prefix_memory)
    moves = _Moves()
    for place, op in enumerate(row):
        policy = prefix_memory.get((op.stage, op.microbatch), ActivationPolicy.KEEP)
        if op.kind is Kind.BACKWARD and policy is ActivationPolicy.OFFLOAD:
            # Not earlier: beside another backward's activations they would set the peak.
            moves.add_before(place, _Turn.NEEDED, MemoryAction(Move.FETCH_ACTIVATIONS, op.stage, op.microbatch))
    if kv_budget_bytes is not None:
        _check_budget(plan, memory, kv_budget_bytes, Kind if training else (Kind.FORWARD,))
        sizes = EntryBytes.of_plan(plan, memory)
        uses = [
            [entry for entry in entries_used(plan.ranks[data_rank][op.microbatch], op) if sizes.of(entry)] for op in row
        ]
        streamed = _stream_entries(moves, uses, sizes, kv_budget_bytes)
        waits = _Waits.of_uses(uses, sizes, streamed)
        if waits.exceed(kv_budget_bytes):
            drops = _Drops.of_row(plan, data_rank, memory, host or link_of(memory), may_drop=training)
            _move_entries(moves, waits, drops, kv_budget_bytes)
    return MemoryPlan(dict(prefix_memory), moves.before_each, moves.after_each)


def dormant_microbatches(plan: Plan, row: Sequence[Op], pipeline_rank: int) -> tuple[tuple[int, int], ...]:
    """(stage, microbatch) whose B is farther from its F in `row` than any of a flat list of as many microbatches."""
    config = plan.config
    flat = build_table(
        [()] * len({op.microbatch for op in row}), num_ranks=config.pipeline_size, num_chunks=config.num_chunks
    )
    usual: dict[int, int] = {}
    for (stage, _), distance in _distances(flat.rows[pipeline_rank]):
        usual[stage] = max(usual.get(stage, 0), distance)
    return tuple(sorted(key for key, distance in _distances(row) if distance > usual[key[0]]))


def _distances(row: Sequence[Op]) -> Iterator[tuple[tuple[int, int], int]]:
    """(stage, microbatch), and how many operations stand between its F and its B."""
    place = {op: index for index, op in enumerate(row)}
    for op, index in place.items():
        if op.kind is Kind.BACKWARD:
            key = op.stage, op.microbatch
            yield key, index - place[Op(op.stage, Kind.FORWARD, op.microbatch)] - 1


def _check_budget(plan: Plan, memory: MemoryModel, budget_bytes: int, kinds: Iterable[Kind]) -> None:
    """Refuse a budget that an operation of any rank alone exceeds, whatever the order of operations."""
    sizes = EntryBytes.of_plan(plan, memory)
    stage = sizes.stage_layers.index(max(sizes.stage_layers))
    needs = (
        (sum(map(sizes.streamed, entries_used(m, op))), rank, op)
        for rank, microbatches in enumerate(plan.ranks)
        for m in microbatches
        for op in (Op(stage, kind, m.id) for kind in kinds)
    )
    needed, rank, op = max(needs, key=lambda need: need[0], default=(0, 0, None))
    if needed > budget_bytes:
        raise ValueError(
            f"Budget of K/V and gK/gV (--kv-budget-gib): operation {op} of data-parallel rank {rank} alone needs {needed:,} "
            f"bytes of them on the device, those of all segments that it reads or writes, {STREAMED_LAYERS} layers at a time; "
            f"the budget is {budget_bytes:,} bytes, {needed - budget_bytes:,} too few. Give at least --kv-budget-gib "
            f"{_rounded_up(needed / GIB)}, or spread the model over more tensor-parallel ranks."
        )


def _rounded_up(number: float) -> str:
    """Four digits, not below `number`."""
    scale = 10.0 ** (3 - math.floor(math.log10(number)))
    return f"{math.ceil(number * scale) / scale:.4g}"


class _Turn(enum.IntEnum):
    """Order of actions before one operation."""

    NEEDED = 0
    COMPUTED = 1
    EARLY = 2


class _Moves:
    """Actions by place, gathered in any order."""

    def __init__(self) -> None:
        self._before: dict[int, list[tuple[_Turn, int, MemoryAction]]] = defaultdict(list)
        self._after: dict[int, list[MemoryAction]] = defaultdict(list)

    def add_before(self, place: int, turn: _Turn, action: MemoryAction) -> None:
        self._before[place].append((turn, action.target, action))

    def add_after(self, place: int, action: MemoryAction) -> None:
        self._after[place].append(action)

    @property
    def before_each(self) -> dict[int, tuple[MemoryAction, ...]]:
        """Microbatches that are computed again in their order: what they read may be computed again too."""
        return {
            place: tuple(action for _, _, action in sorted(self._before[place], key=lambda move: move[:2]))
            for place in sorted(self._before)
        }

    @property
    def after_each(self) -> dict[int, tuple[MemoryAction, ...]]:
        return {place: tuple(self._after[place]) for place in sorted(self._after)}


def _stream_entries(
    moves: _Moves, uses: Sequence[Sequence[Entry]], sizes: EntryBytes, budget_bytes: int
) -> frozenset[Entry]:
    first_use: dict[Entry, int] = {}
    num_uses: Counter[Entry] = Counter()
    for place, used in enumerate(uses):
        num_uses.update(used)
        for entry in used:
            first_use.setdefault(entry, place)
    entries = list(first_use)
    number = {entry: index for index, entry in enumerate(entries)}
    choices = [
        Streamable(sizes.of(entry), sizes.streamed(entry), streamed_moves(entry, num_uses[entry]) * sizes.of(entry))
        for entry in entries
    ]
    chosen = choose_streams(choices, [[number[entry] for entry in used] for used in uses], budget_bytes)
    for index in sorted(chosen):
        moves.add_before(first_use[entries[index]], _Turn.NEEDED, entries[index].action(Move.STREAM))
    return frozenset(entries[index] for index in chosen)


def streamed_moves(entry: Entry, num_uses: int) -> int:
    """Times that a streamed entry crosses the link: K/V once for their writer and once for each that reads them; gK/gV
    both ways, but for the first, which has nothing to add to, and the writer, which takes them."""
    return 2 * (num_uses - 1) if entry.is_gradient else num_uses


@dataclass(frozen=True, slots=True)
class _Waits:
    """`gaps[i]` are those of `entries[i]`, which repeat; needed_bytes[t]: what operation t of the row uses."""

    entries: tuple[Entry, ...]
    gaps: tuple[Gap, ...]
    needed_bytes: tuple[int, ...]

    @classmethod
    def of_uses(cls, uses: Sequence[Sequence[Entry]], sizes: EntryBytes, streamed: Collection[Entry]) -> _Waits:
        """Streamed entries do not wait on the device."""
        needed = [0] * len(uses)
        last_use: dict[Entry, int] = {}
        waits: list[tuple[Entry, Gap]] = []
        for place, used in enumerate(uses):
            for entry in used:
                if entry in streamed:
                    needed[place] += sizes.streamed(entry)
                    continue
                num_bytes = sizes.of(entry)
                needed[place] += num_bytes
                before = last_use.get(entry, place)
                if place > before + 1:
                    waits.append((entry, Gap(num_bytes, Range(before + 1, place))))
                last_use[entry] = place
        return cls(tuple(entry for entry, _ in waits), tuple(gap for _, gap in waits), tuple(needed))

    def load(self, given_up: Collection[int]) -> np.ndarray:
        """Bytes on the device during each operation."""
        return load_of((gap for i, gap in enumerate(self.gaps) if i not in given_up), self.needed_bytes)

    def exceed(self, budget_bytes: int) -> bool:
        return self.load(()).max(initial=0) > budget_bytes


@dataclass(frozen=True, slots=True)
class _Drops:
    """When K/V are worth computing again: seconds of a writer's forward by stage, and of a byte there and back.

    writer: microbatch that writes a block. None of them is dropped where the experts of several ranks run in a forward.
    """

    microbatches: Sequence[Microbatch]
    writer: Mapping[int, int]
    costs: StageCosts
    seconds_per_cost: float
    seconds_per_byte: float

    @classmethod
    def of_row(cls, plan: Plan, data_rank: int, memory: MemoryModel, host: HostLink, *, may_drop: bool) -> _Drops:
        microbatches = plan.ranks[data_rank]
        measured = isinstance(plan.config.deciding, MeasuredCosts)
        num_sharing = memory.tensor_parallel * memory.context_parallel
        may_drop = may_drop and plan.config.expert_block == 1 and memory.expert_parallel == 1
        return cls(
            microbatches=microbatches,
            writer={block: m.id for m in microbatches for block in m.writes} if may_drop else {},
            # The head is not run again.
            costs=stage_costs(plan, data_rank, [0] * len(plan.forest.segments), plan.config.deciding),
            seconds_per_cost=1.0 if measured else 1.0 / (host.flops_per_s * num_sharing),
            seconds_per_byte=2.0 / host.bytes_per_s,
        )

    def choose(self, waits: _Waits, given_up: Collection[int]) -> dict[int, int]:
        """Writer that is computed again, by index of a gap that begins with a drop.

        A writer's forward brings back all of its blocks that are dropped: those of one next use go together.
        """
        together: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index in given_up:
            entry, gap = waits.entries[index], waits.gaps[index]
            if not entry.is_gradient and entry.block in self.writer:
                together[gap.span.stop, entry.stage, self.writer[entry.block]].append(index)
        dropped: dict[int, int] = {}
        free_from: dict[tuple[int, int], int] = {}
        for (place, stage, m), indices in sorted(together.items()):
            seconds = self.seconds_per_cost * self.costs.of_operation(Op(stage, Kind.FORWARD, m))
            moved = self.seconds_per_byte * sum(waits.gaps[i].num_bytes for i in indices)
            first = min(waits.gaps[i].span.start for i in indices)
            if seconds >= moved or first <= free_from.get((stage, m), 0):
                continue
            if self._has_path(waits, given_up, stage, m, place):
                dropped.update(dict.fromkeys(indices, m))
                free_from[stage, m] = place
        return dropped

    def _has_path(self, waits: _Waits, given_up: Collection[int], stage: int, m: int, place: int) -> bool:
        """True where no gap of what `m` reads is given up across `place`: it is kept, or that operation reads it too."""
        path = {Entry(stage, block, False) for block in cached_blocks(self.microbatches[m])}
        return not any(waits.entries[i] in path and place in waits.gaps[i].span for i in given_up)


def _move_entries(moves: _Moves, waits: _Waits, drops: _Drops, budget_bytes: int) -> None:
    given_up = choose_evictions(waits.gaps, waits.needed_bytes, budget_bytes)
    dropped = drops.choose(waits, given_up)
    load = waits.load(given_up)
    again: set[tuple[int, int, int]] = set()
    for index in sorted(given_up, key=lambda i: (waits.gaps[i].span.stop, i)):
        entry, gap = waits.entries[index], waits.gaps[index]
        next_use = gap.span.stop
        if index in dropped:
            moves.add_after(gap.span.start - 1, entry.action(Move.DROP))
            again.add((next_use, entry.stage, dropped[index]))
            continue
        moves.add_after(gap.span.start - 1, entry.action(Move.EVICT))
        if load[next_use - 1] + gap.num_bytes <= budget_bytes:
            load[next_use - 1] += gap.num_bytes
            moves.add_before(next_use - 1, _Turn.EARLY, entry.action(Move.FETCH))
        else:
            moves.add_before(next_use, _Turn.NEEDED, entry.action(Move.FETCH))
    for next_use, stage, m in again:
        moves.add_before(next_use, _Turn.COMPUTED, MemoryAction(Move.RECOMPUTE, stage, m))
