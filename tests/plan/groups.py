"""Random batches for the tests of the planning rooms.

Alphabets of two or three tokens make sharing deep; a trajectory may be drawn as a copy, a strict prefix or a
continuation of an earlier one, so that every kind of border occurs often.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from prefixflow.plan.cost import CostModel
from prefixflow.plan.plan import PlanConfig, PrefixReuse
from prefixflow.trajectories import Trajectory


def trajectory(
    tokens: Sequence[int],
    *,
    name: str = "t",
    group: str = "g",
    trained: Sequence[int] | None = None,
    temperature: float = 1.0,
    advantage: float = 1.0,
) -> Trajectory:
    """A trajectory that trains the tokens at `trained` (None: all but the first)."""
    mask = np.zeros(len(tokens), bool)
    mask[list(range(1, len(tokens)) if trained is None else trained)] = True
    return Trajectory(
        id=name,
        group=group,
        tokens=np.asarray(tokens, np.int64),
        loss_mask=mask,
        advantages=advantage,
        temperature=temperature,
    )


def batch_of(*tokens: Sequence[int], group: str = "g") -> list[Trajectory]:
    """One group of fully trained trajectories."""
    return [trajectory(t, name=f"{group}-{i}", group=group) for i, t in enumerate(tokens)]


@st.composite
def batches(draw: st.DrawFn, max_groups: int = 4, max_members: int = 6) -> list[Trajectory]:
    """1 to `max_groups` groups, their trajectories interleaved at random."""
    owners = [
        group for group in range(draw(st.integers(1, max_groups))) for _ in range(draw(st.integers(1, max_members)))
    ]
    sequences: dict[int, list[list[int]]] = {}
    result = []
    for index, group in enumerate(draw(st.permutations(owners))):
        earlier = sequences.setdefault(group, [])
        tokens = _sequence(draw, earlier)
        earlier.append(tokens)
        trained = draw(st.sets(st.integers(1, len(tokens) - 1))) if len(tokens) > 1 else set()
        result.append(
            trajectory(
                tokens,
                name=f"t{index}",
                group=f"g{group}",
                trained=sorted(trained),
                temperature=draw(st.sampled_from([1.0, 1.0, 0.5])),
            )
        )
    return result


def _sequence(draw: st.DrawFn, earlier: list[list[int]]) -> list[int]:
    fresh = draw(st.lists(st.integers(0, draw(st.integers(0, 2))), min_size=1, max_size=24))
    if not earlier or draw(st.booleans()):
        return fresh
    base = draw(st.sampled_from(earlier))
    cut = draw(st.integers(1, len(base)))
    kinds = {"copy": base, "prefix": base[:cut], "branch": base[:cut] + fresh}
    return kinds[draw(st.sampled_from(sorted(kinds)))]


@st.composite
def configs(draw: st.DrawFn) -> PlanConfig:
    """Budgets from one padded token to more than any batch has; reuse on or auto."""
    multiple = draw(st.integers(1, 8))
    budget = draw(st.one_of(st.integers(multiple, 12), st.integers(12, 60), st.just(100_000)))
    return PlanConfig(
        max_tokens_per_microbatch=max(budget, multiple),
        data_parallel_size=draw(st.integers(1, 4)),
        token_multiple=multiple,
        prefix_reuse=draw(st.sampled_from([PrefixReuse.ON, PrefixReuse.ON, PrefixReuse.AUTO])),
        cost=CostModel(1.0, draw(st.sampled_from([0.0, 3.0])), draw(st.sampled_from([0.0, 0.1]))),
    )


def omitted_of(trajectories: Sequence[Trajectory]) -> st.SearchStrategy[set[int]]:
    """Mostly nothing, else any of the batch."""
    return st.one_of(st.just(set()), st.sets(st.integers(0, len(trajectories) - 1)))


def brute_force_positions(trajectories: Sequence[Trajectory], omit: set[int]) -> int:
    """Distinct (group, prefix through t, token t + 1), counted without a forest."""
    return len(
        {
            (t.group, tuple(t.tokens[: k + 1].tolist()), int(t.tokens[k + 1]))
            for i, t in enumerate(trajectories)
            if i not in omit
            for k in range(len(t.tokens) - 1)
        }
    )
