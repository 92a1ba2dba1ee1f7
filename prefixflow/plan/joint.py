"""Losses that are formed from several trajectories together: the loss calls of a framework that brings its own loss.

Its loss function takes the log-probabilities of all trajectories of one of its microbatches, a *loss call*. What it makes of
one may depend on all of them, so a backward that takes part in a call needs the forwards of every trajectory of it.

Invariants
1. All trajectories of a loss call are on one data-parallel rank.
2. A microbatch takes part in the loss calls of all trajectories through its segments, whether their rows are scored in it
   or not: those that are not cost nothing but some order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from prefixflow.forest.forest import Forest
from prefixflow.plan.microbatch import Microbatch
from prefixflow.trajectories.types import Trajectory


def check_joint(
    joint: Sequence[int],
    trajectories: Sequence[Trajectory],
    placement: Sequence[int] | None,
    num_ranks: int,
    omit: Collection[int] = (),
) -> None:
    """Raise ValueError where the loss calls `joint[i]` of the trajectories cannot be made."""
    if len(joint) != len(trajectories):
        raise ValueError(f"joint: expected a loss call for each of {len(trajectories)} trajectories, got {len(joint)}.")
    unscored = [i for i in sorted(omit) if trajectories[i].num_trained]
    if unscored:
        raise ValueError(
            f"joint: trajectory {trajectories[unscored[0]].id!r} is omitted, but loss call {joint[unscored[0]]} reads its "
            "log-probabilities; omit only trajectories without a trained token."
        )
    if placement is None:
        if num_ranks > 1:
            raise ValueError(
                f"joint: a loss call is made on one data-parallel rank, but its trajectories may go to any of {num_ranks}; "
                "give their placement too."
            )
        return
    rank_of: dict[int, int] = {}
    for call, rank in zip(joint, placement, strict=True):
        if rank_of.setdefault(call, rank) != rank:
            raise ValueError(
                f"joint: loss call {call} has trajectories on data-parallel ranks {rank_of[call]} and {rank}, but is made on "
                "one of them; number the calls of each rank apart."
            )


def forwards_before_loss(joint: Sequence[int], forest: Forest, microbatches: Sequence[Microbatch]) -> list[int]:
    """Of each microbatch of one rank, how many must have run forward for all of its loss calls to be scored; 0 for a dummy."""
    calls = [{joint[member] for s in m.segments for member in forest.segments[s].members} for m in microbatches]
    scored = {call: m.id + 1 for m, of_microbatch in zip(microbatches, calls, strict=True) for call in of_microbatch}
    return [max((scored[call] for call in of_microbatch), default=0) for of_microbatch in calls]
