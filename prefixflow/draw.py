"""Draw a plan: the forest of one data-parallel rank above the timeline of its operations.

Colours tell the phases apart: A, a forward that others read; B, microbatches that nothing else reads; C, the delayed
backward. Widths are predicted work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixflow.forest.forest import Segment
from prefixflow.palette import COLOURS, LEGEND
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.plan import Plan
from prefixflow.schedule.memory import Phase, phase_of
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.search import predicted_timeline
from prefixflow.schedule.simulate import Timeline
from prefixflow.trajectories.types import Trajectory

PREFIX = COLOURS[Phase.PREFIX_FORWARD, Kind.FORWARD]
SUFFIX = COLOURS[Phase.SUFFIX, Kind.FORWARD]


def draw_plan(
    plan: Plan,
    trajectories: Sequence[Trajectory],
    path: str | Path,
    *,
    data_rank: int = 0,
    title: str = "",
) -> None:
    """Write a picture of the rank's forest and schedule to `path` (the suffix chooses the format)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = segment_row_counts(plan.forest, trajectories)
    timeline = predicted_timeline(plan, data_rank, rows)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11, 5.2), gridspec_kw={"height_ratios": [3, 1 + len(timeline.spans)]}
    )
    _draw_forest(top, plan, data_rank)
    _draw_timeline(bottom, plan, data_rank, timeline)
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_forest(axes: Any, plan: Plan, data_rank: int) -> None:
    """Segments at their positions, one lane per branch; the darker, the more trajectories share it."""
    segments = [s for s in plan.forest.segments if s.tree in set(plan.trees[data_rank])]
    home = {s: m for m in plan.ranks[data_rank] for s in m.segments}
    most = max((len(s.members) for s in segments), default=1)
    for lane, segment in _lanes(segments):
        share = len(segment.members) / most
        writes = segment.id in home[segment.id].writes
        axes.barh(
            -lane,
            len(segment),
            left=segment.span.start,
            height=0.8,
            color=_blend("#e2f3e8", PREFIX, share) if segment.is_shared else SUFFIX,
            edgecolor="#1a365d" if writes else "white",
            linewidth=1.2,
        )
        label = f"x{len(segment.members)}  m{home[segment.id].id}" if segment.is_shared else f"m{home[segment.id].id}"
        axes.text(segment.span.start + len(segment) / 2, -lane, label, ha="center", va="center", fontsize=7)
    axes.set_xlabel("position (token)")
    axes.set_yticks([])
    axes.set_title("forest: each shared prefix stands once (xN trajectories, mK microbatch)", fontsize=9)


def _lanes(segments: list[Segment]) -> list[tuple[int, Segment]]:
    """First children continue their parent's lane; every other segment opens one."""
    lanes: dict[int, int] = {}
    continued: set[int] = set()
    next_lane = 0
    placed = []
    for segment in segments:
        if segment.parent is not None and segment.parent not in continued:
            continued.add(segment.parent)
            lanes[segment.id] = lanes[segment.parent]
        else:
            lanes[segment.id] = next_lane
        next_lane = max(next_lane, lanes[segment.id] + 1)
        placed.append((lanes[segment.id], segment))
    return placed


def _draw_timeline(axes: Any, plan: Plan, data_rank: int, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    makespan = timeline.makespan or 1.0
    for rank, row in enumerate(timeline.spans):
        for op, start, end in row:
            colour = COLOURS[phase_of(plan.ranks[data_rank][op.microbatch], op.kind), op.kind]
            axes.barh(-rank, end - start, left=start, height=0.8, color=colour, edgecolor="white")
            if end - start > 0.012 * makespan:
                text = f"{op.kind.value}{op.microbatch}"
                axes.text((start + end) / 2, -rank, text, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks([-r for r in range(len(timeline.spans))])
    axes.set_yticklabels([f"stage {r}" for r in range(len(timeline.spans))])
    axes.set_xticks([])
    axes.set_xlabel("predicted time")
    handles = [Patch(color=COLOURS[key], label=text) for key, text in LEGEND.items()]
    axes.legend(handles=handles, ncol=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def _blend(light: str, dark: str, share: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(a + (b - a) * 0.6 * share for a, b in zip(to_rgb(light), to_rgb(dark), strict=True))
