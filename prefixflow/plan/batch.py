"""The integers of one microbatch: tokens, positions and the rows that own a log-probability.

Words. *Entry*: a trained (trajectory, token) pair; entry t is about token t as predicted from the tokens before it, so
its log-probability is formed at position t - 1. *Row*: a (position, temperature) of the microbatch that at least one
entry needs; entries of several trajectories may share a row (shared response tokens), each with its own advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixflow.forest.forest import Forest
from prefixflow.plan.microbatch import Microbatch
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchArrays:
    """Arrays of one microbatch of T physical tokens, R rows and E entries (int64; `row_temperature` and `mean_weight` float64).

    tokens, positions [T]: padding has token 0 and position 0.
    segment_of [T]: index into the microbatch's `segments`, -1 for padding.
    multiplicity [T]: trajectories through the position, 0 for padding.
    mean_weight [T]: sum of 1 / (positions of g) over the trajectories g through the position, 0 for padding.
    row_index [R]: place in the microbatch; row_label [R]: token scored there; row_temperature [R] float64.
    entry_row [E]: row of each entry; entry_trajectory, entry_token [E]: which (trajectory, token) it is.
    routes [T, moe layers, top-k]: experts to replay, -1 where unknown and for padding; None without replay.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_of: np.ndarray
    multiplicity: np.ndarray
    mean_weight: np.ndarray
    row_index: np.ndarray
    row_label: np.ndarray
    row_temperature: np.ndarray
    entry_row: np.ndarray
    entry_trajectory: np.ndarray
    entry_token: np.ndarray
    routes: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.row_index)


def microbatch_arrays(
    forest: Forest,
    microbatch: Microbatch,
    trajectories: Sequence[Trajectory],
    routes: Sequence[np.ndarray] | None = None,
) -> MicrobatchArrays:
    """Gather the arrays of `microbatch`; `routes` are `Plan.routes`."""
    num_physical = microbatch.num_physical_tokens
    tokens = np.zeros(num_physical, np.int64)
    positions = np.zeros(num_physical, np.int64)
    labels = np.zeros(num_physical, np.int64)
    segment_of = np.full(num_physical, -1)
    multiplicity = np.zeros(num_physical, np.int64)
    mean_weight = np.zeros(num_physical)
    replayed = None if routes is None else np.full((num_physical, *routes[0].shape[1:]), -1)
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]] = []
    for place, (s, span) in enumerate(zip(microbatch.segments, microbatch.spans, strict=True)):
        segment = forest.segments[s]
        source = trajectories[segment.source].tokens
        start, stop = segment.span.start, segment.span.stop
        tokens[span.slice] = source[start:stop]
        labels[span.slice] = source[start + 1 : stop + 1]
        positions[span.slice] = np.arange(start, stop)
        segment_of[span.slice] = place
        multiplicity[span.slice] = len(segment.members)
        mean_weight[span.slice] = sum(1.0 / forest.lengths[member] for member in segment.members)
        if routes is not None and replayed is not None:
            replayed[span.slice] = routes[segment.source][start:stop]
        for member in segment.members:
            trained = np.flatnonzero(trajectories[member].loss_mask[start + 1 : stop + 1])
            if len(trained):
                owner = np.full(len(trained), member, np.int64)
                temperature = float(trajectories[member].temperature)
                entries.append((trained + span.start, owner, trained + start + 1, temperature))
    rows = _rows(labels, entries)
    return MicrobatchArrays(
        tokens=tokens,
        positions=positions,
        segment_of=segment_of,
        multiplicity=multiplicity,
        mean_weight=mean_weight,
        routes=replayed,
        **rows,
    )


def _rows(labels: np.ndarray, entries: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]]) -> dict[str, np.ndarray]:
    """Row and entry arrays of `MicrobatchArrays` from (places, trajectories, tokens, temperature) of its members."""
    empty = np.zeros(0, np.int64)
    place = np.concatenate([e[0] for e in entries]) if entries else empty
    temperature = np.concatenate([np.full(len(e[0]), e[3]) for e in entries]) if entries else np.zeros(0)
    distinct_temperatures, temperature_id = np.unique(temperature, return_inverse=True)
    key = place * max(len(distinct_temperatures), 1) + temperature_id
    rows, entry_row = np.unique(key, return_inverse=True)
    row_index = rows // max(len(distinct_temperatures), 1)
    row_temperature = distinct_temperatures[rows % len(distinct_temperatures)] if len(rows) else np.zeros(0)
    return {
        "row_index": row_index,
        "row_label": labels[row_index],
        "row_temperature": row_temperature,
        "entry_row": entry_row.astype(np.int64),
        "entry_trajectory": np.concatenate([e[1] for e in entries]) if entries else empty,
        "entry_token": np.concatenate([e[2] for e in entries]) if entries else empty,
    }


def segment_row_counts(forest: Forest, trajectories: Sequence[Trajectory]) -> list[int]:
    """Rows each segment owns (distinct positions with a trained successor), for the cost model."""
    counts = []
    for segment in forest.segments:
        start, stop = segment.span.start + 1, segment.span.stop + 1
        first = trajectories[segment.source].loss_mask[start:stop]
        if segment.is_shared:
            first = np.logical_or.reduce([trajectories[m].loss_mask[start:stop] for m in segment.members])
        counts.append(int(np.count_nonzero(first)))
    return counts
