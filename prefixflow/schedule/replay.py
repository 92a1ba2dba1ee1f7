"""Follow a row and its memory plan: what is on the device and on the host at each operation (pure).

Asserts what a correct memory plan keeps (`prefixflow.schedule.residency`, invariants 1 and 2), as the runtime's cache would
raise; with an empty memory plan the result is the cache of today: freed at last use, nothing moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prefixflow.plan.plan import Plan
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.residency import (
    ActivationPolicy,
    Entry,
    EntryBytes,
    MemoryAction,
    MemoryPlan,
    Move,
    Part,
    cached_blocks,
    entries_used,
)


@dataclass(frozen=True, slots=True)
class CachePoint:
    """Most bytes of K/V and of gK/gV on the device, and of both on the host, from the moves before an operation to its end."""

    op: Op
    keys_values: int
    gradients: int
    host: int

    @property
    def device_bytes(self) -> int:
        return self.keys_values + self.gradients


@dataclass(frozen=True, slots=True)
class CacheReplay:
    """`points[t]` of operation t of the row. moved_bytes: to the host and back. peaks: the largest at any operation."""

    points: tuple[CachePoint, ...]
    moved_bytes: int
    num_evictions: int
    num_recomputes: int

    @property
    def peak_kv_bytes(self) -> int:
        return max((point.keys_values for point in self.points), default=0)

    @property
    def peak_bytes(self) -> int:
        return max((point.device_bytes for point in self.points), default=0)

    @property
    def peak_host_bytes(self) -> int:
        return max((point.host for point in self.points), default=0)


def replay_cache(
    plan: Plan,
    data_rank: int,
    row: Sequence[Op],
    memory: MemoryModel,
    memory_plan: MemoryPlan | None = None,
    *,
    kv_budget_bytes: int | None = None,
) -> CacheReplay:
    """Bytes of the cache along a rank's row; AssertionError where `memory_plan` breaks an invariant or the budget."""
    memory_plan = memory_plan or MemoryPlan()
    walk = _Walk(plan, data_rank, row, memory, memory_plan, kv_budget_bytes)
    points = tuple(walk.run(place, op) for place, op in enumerate(row))
    walk.assert_empty()
    return CacheReplay(points, walk.moved_bytes, walk.num_evictions, walk.num_recomputes)


def kv_bytes_kept_to_end(plan: Plan, data_rank: int, row: Sequence[Op], memory: MemoryModel) -> int:
    """K/V of all written blocks of a rank's row together: the peak if none was freed before the end of the step."""
    sizes = EntryBytes.of_plan(plan, memory)
    stages = {op.stage for op in row}
    blocks = [block for m in plan.ranks[data_rank] for block in m.writes]
    return sum(sizes.of(Entry(stage, block, False)) for stage in stages for block in blocks)


class _Walk:
    def __init__(
        self,
        plan: Plan,
        data_rank: int,
        row: Sequence[Op],
        memory: MemoryModel,
        memory_plan: MemoryPlan,
        budget_bytes: int | None,
    ) -> None:
        self.microbatches = plan.ranks[data_rank]
        self.sizes = EntryBytes.of_plan(plan, memory)
        self.plan = memory_plan
        # See `StageRunner`: where nothing is done for memory.
        self.reads_own = memory.reads_own_keys and not memory_plan
        self.budget_bytes = budget_bytes
        self.uses = {op: self._used(op) for op in row}
        self.open_uses = Counter(entry for op in row for entry in self.uses[op])
        self.device: set[Entry] = set()
        self.host: set[Entry] = set()
        self.dropped: set[Entry] = set()
        self.streamed: set[Entry] = set()
        self.made: set[Entry] = set()
        self.waiting = {key for key, policy in memory_plan.activations.items() if policy is ActivationPolicy.OFFLOAD}
        self.open_activations: set[tuple[int, int]] = set()
        self.bytes = Counter[str]()
        self.moved_bytes = self.num_evictions = self.num_recomputes = 0
        stray = (memory_plan.before.keys() | memory_plan.after.keys()) - set(range(len(row)))
        assert not stray, f"actions at places {sorted(stray)} of a row of {len(row)} operations"

    def run(self, place: int, op: Op) -> CachePoint:
        for action in self.plan.before.get(place, ()):
            self._act(action)
        self._use(op)
        point = CachePoint(op, self.bytes["kv"], self.bytes["gkv"], self.bytes["host"])
        self._free(op)
        for action in self.plan.after.get(place, ()):
            self._act(action)
        return point

    def assert_empty(self) -> None:
        left = self.device | self.host | self.dropped | self.streamed
        assert not left, f"left at the end: {sorted(left)}"
        assert not any(self.bytes.values()), f"bytes left at the end: {self.bytes}"
        assert not self.waiting, f"activations never fetched: {sorted(self.waiting)}"

    def _use(self, op: Op) -> None:
        m = self.microbatches[op.microbatch]
        for entry in self.uses[op]:
            makes = (
                entry.block in m.writes
                if op.kind is Kind.FORWARD
                else entry.is_gradient and entry.block not in m.writes
            )
            is_new = entry not in self.made
            assert makes or not is_new, f"{op} needs {entry}, which nothing has made"
            self.made.add(entry)
            if entry in self.streamed:
                self._stream(entry, is_new=is_new)
            elif is_new:
                self._place(entry)
            else:
                assert entry in self.device, f"{op} needs {entry}, which is not on the device"
        key = op.stage, op.microbatch
        if op.kind is Kind.FORWARD:
            self.open_activations.add(key)
        else:
            assert key not in self.waiting, f"{op} runs before its activations are fetched"
            self.open_activations.remove(key)

    def _stream(self, entry: Entry, *, is_new: bool) -> None:
        """One use: its layers cross the link as they are used; the host holds the whole until it is freed."""
        num_bytes = self.sizes.of(entry)
        if is_new:
            self._count("host", num_bytes)
        self.moved_bytes += num_bytes
        if entry.is_gradient and not is_new and self.open_uses[entry] > 1:
            self.moved_bytes += num_bytes
        self._count(entry.part.value, self.sizes.streamed(entry))

    def _free(self, op: Op) -> None:
        for entry in self.uses[op]:
            self.open_uses[entry] -= 1
            is_last = not self.open_uses[entry]
            if entry in self.streamed:
                self._count(entry.part.value, -self.sizes.streamed(entry))
                if is_last:
                    self.streamed.remove(entry)
                    self._count("host", -self.sizes.of(entry))
            elif is_last:
                self._remove(entry)

    def _used(self, op: Op) -> list[Entry]:
        used = entries_used(self.microbatches[op.microbatch], op, reads_own=self.reads_own)
        return [entry for entry in used if self.sizes.of(entry)]

    def _act(self, action: MemoryAction) -> None:
        if action.move is Move.RECOMPUTE:
            self._recompute(action)
            return
        if action.move is Move.FETCH_ACTIVATIONS:
            key = action.stage, action.target
            assert key in self.waiting & self.open_activations, f"{action}: nothing to fetch"
            self.waiting.remove(key)
            return
        entry = Entry(action.stage, action.target, action.part is Part.GRADIENTS)
        if action.move is Move.STREAM:
            assert entry not in self.made, f"{action}: it exists already"
            self.streamed.add(entry)
            return
        if action.move is Move.FETCH:
            assert entry in self.host, f"{action}: not on the host"
            self.host.remove(entry)
            self._count("host", -self.sizes.of(entry))
            self._place(entry)
        else:
            assert entry in self.device, f"{action}: not on the device"
            self._remove(entry)
            if action.move is Move.DROP:
                self.dropped.add(entry)
                return
            self.host.add(entry)
            self._count("host", self.sizes.of(entry))
            self.num_evictions += 1
        self.moved_bytes += self.sizes.of(entry)

    def _recompute(self, action: MemoryAction) -> None:
        m = self.microbatches[action.target]
        path = {Entry(action.stage, block, False) for block in cached_blocks(m)}
        away = path - self.device - self.streamed
        assert not away, f"{action}: {sorted(away)} are not on the device"
        anew = {Entry(action.stage, block, False) for block in m.writes} & self.dropped
        assert anew, f"{action}: none of its blocks was dropped"
        assert (action.stage, action.target) in self.open_activations, f"{action}: its stage input is gone"
        self.dropped -= anew
        for entry in anew:
            self._place(entry)
        self.num_recomputes += 1

    def _place(self, entry: Entry) -> None:
        self.device.add(entry)
        self._count(entry.part.value, self.sizes.of(entry))
        held = self.bytes["kv"] + self.bytes["gkv"]
        assert self.budget_bytes is None or held <= self.budget_bytes, (
            f"{held} bytes exceed {self.budget_bytes} at {entry}"
        )

    def _remove(self, entry: Entry) -> None:
        self.device.remove(entry)
        self._count(entry.part.value, -self.sizes.of(entry))

    def _count(self, where: str, num_bytes: int) -> None:
        self.bytes[where] += num_bytes
        held = self.bytes["kv"] + self.bytes["gkv"]
        assert self.budget_bytes is None or held <= self.budget_bytes, f"{held} bytes exceed {self.budget_bytes}"
