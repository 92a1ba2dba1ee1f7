"""The longest prefix and the largest group that fit a memory budget, by how a step is run (pure).

One group of `group_size` trajectories with a common prefix, as many groups as ranks exchange tokens. Dense has the token budget of
one trajectory, since it cannot do with less; reuse has that, and where it does not fit, parts of it: in microbatches of a whole
trajectory nothing dormant is left to give up. A longer prefix, and a larger group, never need less, so the longest is found by
doubling and bisection; each trial is a plan whose peak is predicted like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from prefixflow.plan.plan import Plan, PlanConfig, PrefixReuse, build_plan
from prefixflow.schedule.fit import SMALLEST_TOKEN_BUDGET, Judge, MemoryChoice
from prefixflow.schedule.memory import MemoryModel, Recompute
from prefixflow.schedule.residency import ActivationPolicy
from prefixflow.trajectories.types import Trajectory

LARGEST_GROUP = 1024
TOKEN_SHARES = (1, 2, 4, 8, 16)
"""Token budgets of reuse that are tried, as parts of a trajectory."""
PREFIX_STEP = 64
"""Tokens to which the longest prefix is found."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group of `size` trajectories: a common prefix, and a suffix that is trained, in tokens."""

    size: int
    prefix_tokens: int
    suffix_tokens: int

    @classmethod
    def typical(cls, trajectories: Sequence[Trajectory]) -> GroupShape:
        """Medians over the groups of a batch; the prefix is what all members of a group begin with."""
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        prefixes = [_common_tokens(members) for members in groups.values()]
        longest = [max(map(len, members)) for members in groups.values()]
        return cls(
            size=median_low([len(members) for members in groups.values()]),
            prefix_tokens=max(1, median_low(prefixes)),
            suffix_tokens=max(1, median_low([n - p for n, p in zip(longest, prefixes, strict=True)])),
        )

    def trajectories(self, num_groups: int) -> tuple[Trajectory, ...]:
        """Tokens differ where they must; what they are does not matter to a plan."""
        length = self.prefix_tokens + self.suffix_tokens
        mask = np.arange(length) >= self.prefix_tokens
        made = []
        for group, member in itertools.product(range(num_groups), range(self.size)):
            tokens = np.zeros(length, np.int64)
            tokens[self.prefix_tokens] = 1 + member
            made.append(Trajectory(f"{group}/{member}", str(group), tokens, mask, 1.0))
        return tuple(made)


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is run: its name, reuse, the policy of dormant activations, Megatron's own recomputation."""

    name: str
    reuse: PrefixReuse
    choice: MemoryChoice
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class Capacity:
    """Longest prefix with the group's size and suffix, and largest group with its prefix and suffix; None: nothing fits.

    prefix_budget, group_budget: the largest token budget of a microbatch, of those that are tried, with which each fits.
    """

    way: Way
    prefix_tokens: int | None
    group_size: int | None
    prefix_budget: int | None
    group_budget: int | None


def ways() -> Iterator[Way]:
    """Dense and reuse under every policy, each without recomputation and with all layers recomputed."""
    for recompute in (Recompute.NONE, Recompute.FULL):
        suffix = "" if recompute is Recompute.NONE else ", full recomputation"
        yield Way(f"dense{suffix}", PrefixReuse.OFF, MemoryChoice(), recompute)
        for policy in ActivationPolicy:
            yield Way(f"reuse, {policy.value}{suffix}", PrefixReuse.ON, MemoryChoice(policy), recompute)


def find_capacity(
    group: GroupShape, config: PlanConfig, memory: MemoryModel, budget_bytes: int
) -> tuple[Capacity, ...]:
    """Of every way, for the layout of `config` and `memory`."""
    return tuple(_capacity(group, way, config, memory, budget_bytes) for way in ways())


def _capacity(group: GroupShape, way: Way, config: PlanConfig, memory: MemoryModel, budget_bytes: int) -> Capacity:
    prefix = _Search(group, "prefix_tokens", way, config, memory, budget_bytes)
    size = _Search(group, "size", way, config, memory, budget_bytes)
    prefix_tokens = _largest(prefix.fits, memory.shape.max_positions - group.suffix_tokens, PREFIX_STEP)
    # Alone a trajectory shares nothing, and nothing of it waits: it can need more than two do.
    group_size = _largest(size.fits, LARGEST_GROUP, 1, smallest=1 + (way.reuse is not PrefixReuse.OFF))
    return Capacity(way, prefix_tokens, group_size, prefix.token_budget(prefix_tokens), size.token_budget(group_size))


class _Search:
    """Trials of one way with a growing `field` of the group, each under falling token budgets."""

    def __init__(
        self, group: GroupShape, field: str, way: Way, config: PlanConfig, memory: MemoryModel, budget_bytes: int
    ) -> None:
        self._group = group
        self._field = field
        self._way = way
        self._config = config
        self._memory = replace(memory, recompute=way.recompute)
        self._budget_bytes = budget_bytes
        self._shares = TOKEN_SHARES if way.reuse is PrefixReuse.ON else (1,)
        # By share, the smallest trial that did not fit: none above it does.
        self._too_much: dict[int, int] = {}

    def fits(self, number: int) -> bool:
        return self.token_budget(number) is not None

    def token_budget(self, number: int | None) -> int | None:
        """The largest, of those that are tried, with which a step of `number` fits."""
        if number is None:
            return None
        group = replace(self._group, **{self._field: number})
        trajectories = group.trajectories(self._config.expert_block)
        judge = Judge(trajectories, self._memory)
        num_tokens, multiple = group.prefix_tokens + group.suffix_tokens, self._config.token_multiple
        for share in self._shares:
            tokens = -(-num_tokens // (share * multiple)) * multiple
            if share > 1 and tokens < SMALLEST_TOKEN_BUDGET:
                return None
            if number >= self._too_much.get(share, number + 1):
                continue
            fit = judge.fit(_plan(self._way, self._config, trajectories, tokens), self._way.choice)
            if fit is not None and fit.largest_bytes <= self._budget_bytes:
                return tokens
            self._too_much[share] = number
        return None


def _plan(way: Way, config: PlanConfig, trajectories: Sequence[Trajectory], max_tokens: int) -> Plan:
    return build_plan(
        trajectories,
        replace(
            config,
            prefix_reuse=way.reuse,
            data_parallel_size=config.expert_block,
            max_tokens_per_microbatch=max_tokens,
            route_mismatch=None,
        ),
    )


def _largest(fits: Callable[[int], bool], limit: int, step: int, *, smallest: int | None = None) -> int | None:
    """Largest multiple of `step` up to `limit` (or `limit`) that fits, if any does; `smallest` (`step`) is tried first."""
    good, bad = 0, smallest or step
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    if bad > limit:
        if limit > good and fits(limit):
            return limit
        bad = limit
    while bad - good > step:
        middle = (good + bad) // 2 // step * step
        if middle == good:
            break
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good or None


def _common_tokens(members: Sequence[Trajectory]) -> int:
    first, shortest = members[0].tokens, min(map(len, members))
    differs = np.zeros(shortest, bool)
    for other in members[1:]:
        differs |= first[:shortest] != other.tokens[:shortest]
    return int(np.argmax(differs)) if differs.any() else shortest - 1
