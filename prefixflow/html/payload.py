"""What the page draws, as JSON: forest, microbatches, operations in time, memory and loads.

Long lists are flat runs of integers, WIDTH of them an item, so that ten thousand trajectories stay a few megabytes.
What exceeds a limit is left out where it matters least, and counted: trees that save least, replicas that finish first,
the end of a row, memory between the largest values.

Words. *Replica*: one data-parallel rank with its pipeline. *Tick*: a millionth of the slowest replica's predicted time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixflow.forest.forest import Forest, Segment
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.plan import Plan
from prefixflow.schedule.fit import MemoryChoice
from prefixflow.schedule.memory import MemoryModel, Phase
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.peak import MemoryPoint, memory_curve
from prefixflow.schedule.search import predicted_timeline, rank_table
from prefixflow.schedule.simulate import Timeline
from prefixflow.trajectories.types import Trajectory

TICKS = 1_000_000
MEMORY_LEVELS = 10_000
MAX_SEGMENTS = 30_000
MAX_OPERATIONS = 80_000
MAX_MEMORY_POINTS = 60_000
MAX_ROW_MEMORY_POINTS = 1_500
MAX_PROFILE_BINS = 480
MAX_NAME_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, the trajectories it is of, and the bytes that its things take."""

    plan: Plan
    trajectories: Sequence[Trajectory]
    memory: MemoryModel
    choice: MemoryChoice = field(default_factory=MemoryChoice)

    def curves(self, data_rank: int, rows: Sequence[Sequence[Op]] | None = None) -> tuple[tuple[MemoryPoint, ...], ...]:
        """Memory along the row of each pipeline rank of a data-parallel rank, or along the first operations of each."""
        head_rows = segment_row_counts(self.plan.forest, self.trajectories)
        return tuple(
            memory_curve(
                self.plan,
                data_rank,
                row,
                self.memory,
                rows=head_rows,
                memory_plan=self.choice.memory_plan(
                    self.plan, data_rank, pipeline_rank, self.memory, None, training=True
                ),
            )[: None if rows is None else len(rows[pipeline_rank])]
            for pipeline_rank, row in enumerate(rank_table(self.plan, data_rank).rows)
        )


def payload(step: PlannedStep) -> dict[str, Any]:
    """JSON-serialisable object for the script of the page; its fields are named in the functions below."""
    plan = step.plan
    rows = segment_row_counts(plan.forest, step.trajectories)
    timelines = [predicted_timeline(plan, rank, rows) for rank in range(len(plan.ranks))]
    makespan = max((timeline.makespan for timeline in timelines), default=0.0)
    return {
        "forest": _forest(step, rows),
        "replicas": _replicas(step, timelines, makespan),
        "stepCost": makespan,
        "unit": "FLOP" if plan.config.measured is None else "s",
        "ticks": TICKS,
        "pipelineSize": plan.config.pipeline_size,
        "numChunks": plan.config.num_chunks,
        "stateBytes": step.memory.state_bytes,
    }


def _forest(step: PlannedStep, rows: Sequence[int]) -> dict[str, Any]:
    """Trees by saved tokens, and WIDTH = 7 integers a segment.

    segments: parent (index among those drawn, -1 for a root), tokens, trajectories, microbatch, loss rows, whether its
    K/V are cached, a trajectory (index among `ids`). trees: name, replica, number of segments.
    """
    plan = step.plan
    home = {s: m for rank in plan.ranks for m in rank for s in m.segments}
    replica = {tree: rank for rank, trees in enumerate(plan.trees) for tree in trees}
    trees: list[list[Any]] = []
    segments: list[int] = []
    ids: dict[int, int] = {}
    place: dict[int, int] = {}
    for tree in _trees_by_saving(plan.forest):
        drawn = tree[: MAX_SEGMENTS - len(place)]
        if not drawn:
            break
        trees.append([_tree_name(tree, step.trajectories), replica[tree[0].tree], len(drawn)])
        for s in drawn:
            place[s.id] = len(place)
            parent = -1 if s.parent is None else place[s.parent]
            source = ids.setdefault(s.source, len(ids))
            written = s.id in home[s.id].writes
            segments += (parent, len(s), len(s.members), home[s.id].id, rows[s.id], int(written), source)
    return {
        "trees": trees,
        "segments": segments,
        "ids": [_short(step.trajectories[i].id) for i in ids],
        "numTrees": len({s.tree for s in plan.forest.segments}),
        "numSegments": len(plan.forest.segments),
        "profile": _profile(plan.forest),
    }


def _trees_by_saving(forest: Forest) -> list[list[Segment]]:
    """Segments of each tree in pre-order, the tree with most saved tokens first."""
    trees: dict[int, list[Segment]] = {}
    for segment in forest.segments:
        trees.setdefault(segment.tree, []).append(segment)
    return sorted(trees.values(), key=lambda tree: -sum((len(s.members) - 1) * len(s) for s in tree))


def _tree_name(tree: Sequence[Segment], trajectories: Sequence[Trajectory]) -> str:
    groups = list(dict.fromkeys(trajectories[m].group for s in tree if s.parent is None for m in s.members))
    others = f" and {len(groups) - 1} more" if len(groups) > 1 else ""
    return _short(str(groups[0])) + others


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 1]}…"


def _profile(forest: Forest) -> dict[str, Any]:
    """Positions run at each place of the sequence, averaged over bins of `width` places.

    logical: by a dense run; computed: with reuse; shared: those of them that several trajectories share.
    """
    end = max((s.span.stop for s in forest.segments), default=0)
    changes = {name: np.zeros(end + 1) for name in ("logical", "computed", "shared")}
    for segment in forest.segments:
        weights = (len(segment.members), 1, int(segment.is_shared))
        for counts, weight in zip(changes.values(), weights, strict=True):
            counts[segment.span.start] += weight
            counts[segment.span.stop] -= weight
    width = max(1, math.ceil(end / MAX_PROFILE_BINS))
    starts = np.arange(0, end, width)
    sizes = np.minimum(width, end - starts)
    return {"end": end, "width": width} | {
        name: (np.add.reduceat(np.cumsum(counts)[:end], starts) / sizes).round(2).tolist() if end else []
        for name, counts in changes.items()
    }


def _replicas(step: PlannedStep, timelines: Sequence[Timeline], makespan: float) -> list[dict[str, Any]]:
    """One object a replica, in rank order; `rows` and `memory` only of those that are drawn, the slowest first."""
    plan = step.plan
    num_operations = [sum(map(len, timeline.spans)) for timeline in timelines]
    slowest_first = sorted(range(len(timelines)), key=lambda rank: -timelines[rank].makespan)
    chosen: list[int] = []
    left = MAX_OPERATIONS
    for rank in slowest_first:
        if not chosen or num_operations[rank] <= left:
            chosen.append(rank)
            left -= num_operations[rank]
    replicas = []
    for rank, timeline in enumerate(timelines):
        microbatches = plan.ranks[rank]
        replica: dict[str, Any] = {
            "load": plan.rank_loads[rank],
            "trees": len(plan.trees[rank]),
            "tokens": sum(m.num_tokens for m in microbatches),
            "microbatches": sum(not m.is_dummy for m in microbatches),
            "makespan": timeline.makespan / makespan if makespan else 0.0,
            "busy": timeline.efficiency,
            "operations": num_operations[rank],
        }
        replicas.append(replica | (_drawn(step, rank, timeline, makespan, len(chosen)) if rank in chosen else {}))
    return replicas


def _drawn(step: PlannedStep, rank: int, timeline: Timeline, makespan: float, num_drawn: int) -> dict[str, Any]:
    """Microbatches [tokens, physical tokens, reads] and the rows of one replica."""
    num_rows = len(timeline.spans)
    longest_row = MAX_OPERATIONS // num_rows
    spans = [row[:longest_row] for row in timeline.spans]
    curves = step.curves(rank, [[op for op, _, _ in row] for row in spans])
    top = max((point.total_bytes for curve in curves for point in curve), default=0)
    level_bytes = max(1, math.ceil(top / MEMORY_LEVELS))
    most_points = min(MAX_ROW_MEMORY_POINTS, max(1, MAX_MEMORY_POINTS // (num_rows * num_drawn)))
    return {
        "mb": [[m.num_tokens, m.num_physical_tokens, m.reads] for m in step.plan.ranks[rank]],
        "rows": [_operations(row, num_rows, makespan) for row in spans],
        "levelBytes": level_bytes,
        "memory": [_memory(curve, level_bytes, most_points) for curve in curves],
    }


def _operations(row: Sequence[tuple[Op, float, float]], num_ranks: int, makespan: float) -> list[int]:
    """WIDTH = 4 integers an operation: 2 * chunk + (1 if backward), microbatch, ticks idle before it, ticks it takes."""
    flat: list[int] = []
    before = 0
    for op, start, end in row:
        first, last = round(start / makespan * TICKS), round(end / makespan * TICKS)
        chunk = op.stage // num_ranks
        flat += (2 * chunk + (op.kind is Kind.BACKWARD), op.microbatch, first - before, last - first)
        before = last
    return flat


def _memory(curve: Sequence[MemoryPoint], level_bytes: int, most_points: int) -> dict[str, Any]:
    """The largest of every `stride` operations, and the peak of each phase as (operation, bytes, bytes by holder).

    points, WIDTH = 7: operation, then levels by holder. Holders: activations, K/V, gK/gV, logits, what is under way between
    ranks, and what the operation works in.
    """
    stride = max(1, math.ceil(len(curve) / most_points))
    points: list[int] = []
    for start in range(0, len(curve), stride):
        index = max(range(start, min(start + stride, len(curve))), key=lambda i: curve[i].total_bytes)
        points += (index, *(round(size / level_bytes) for size in curve[index].by_holder.values()))
    peaks: dict[str, tuple[int, int, list[int]]] = {}
    for phase in Phase:
        of_phase = [i for i, p in enumerate(curve) if p.phase is phase]
        if of_phase:
            index = max(of_phase, key=lambda i: curve[i].total_bytes)
            peaks[phase.value] = (index, curve[index].total_bytes, list(curve[index].by_holder.values()))
    return {"stride": stride, "points": points, "peaks": peaks}
