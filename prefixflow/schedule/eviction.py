"""Which cached entries leave the device, and between which of their uses (pure; offline, since the plan knows every use).

Words. A *gap* of an entry is the run of operations between two uses of it that follow each other. An entry is on the device
during the operations that use it; in a gap it may be on the host, at the price of its bytes there and back.

Where a single operation needs more than the budget, some of what it uses is *streamed*: on the host from its making to its
end, and on the device a layer at a time while an operation works on it. Those that move the fewest bytes for a byte saved
are streamed first. Everything else waits as follows.

Strategy: go through the operations; where what is needed and what waits exceed the budget, the waiting entry whose next use
is farthest leaves (Belady). Each gap is kept or not as a whole, so for entries of one size this moves the least possible.
Sizes differ in fact, where the optimum is NP-hard: three rules choose the one to leave, gaps that turn out to fit after all
are taken back, and the rule that moves the fewest bytes wins. The least recently used one is the third rule, so the choice
never moves more than an online cache would.

Invariants
1. At every operation the bytes needed and the bytes of the gaps kept across it are within the budget.
2. No gap that is given up fits beside those that are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixflow.ranges import Range


@dataclass(frozen=True, slots=True)
class Gap:
    """An entry of `num_bytes` waits during the operations `span`, by their index in the row."""

    num_bytes: int
    span: Range


Rule = Callable[[Gap], tuple[int, int]]
"""Of the gaps that wait, the one of the smallest value is given up."""


def farthest_next_use(gap: Gap) -> tuple[int, int]:
    return -gap.span.stop, -gap.num_bytes


def smallest(gap: Gap) -> tuple[int, int]:
    return gap.num_bytes, -gap.span.stop


def least_recently_used(gap: Gap) -> tuple[int, int]:
    return gap.span.start, -gap.num_bytes


RULES: tuple[Rule, ...] = (farthest_next_use, smallest, least_recently_used)


def choose_evictions(gaps: Sequence[Gap], needed_bytes: Sequence[int], budget_bytes: int) -> frozenset[int]:
    """Indices of the gaps that are given up; `needed_bytes[t]` what operation t uses, none above the budget."""
    assert max(needed_bytes, default=0) <= budget_bytes, "an operation alone exceeds the budget"
    choices = (
        _without_needless(gaps, evicted_by(rule, gaps, needed_bytes, budget_bytes), needed_bytes, budget_bytes)
        for rule in RULES
    )
    return min(choices, key=lambda evicted: sum(gaps[i].num_bytes for i in evicted))


def evicted_by(rule: Rule, gaps: Sequence[Gap], needed_bytes: Sequence[int], budget_bytes: int) -> frozenset[int]:
    """What an offline cache gives up when, at each operation that exceeds the budget, `rule` picks the next to go."""
    opening: dict[int, list[int]] = {}
    for index, gap in enumerate(gaps):
        opening.setdefault(gap.span.start, []).append(index)
    closing_bytes = [0] * (len(needed_bytes) + 1)
    waiting: list[tuple[tuple[int, int], int]] = []
    waiting_bytes = 0
    evicted: set[int] = set()
    for place, needed in enumerate(needed_bytes):
        waiting_bytes -= closing_bytes[place]
        for index in opening.get(place, ()):
            heapq.heappush(waiting, (rule(gaps[index]), index))
            waiting_bytes += gaps[index].num_bytes
            closing_bytes[gaps[index].span.stop] += gaps[index].num_bytes
        while needed + waiting_bytes > budget_bytes:
            _, index = heapq.heappop(waiting)
            gap = gaps[index]
            if gap.span.stop > place:
                evicted.add(index)
                waiting_bytes -= gap.num_bytes
                closing_bytes[gap.span.stop] -= gap.num_bytes
    return frozenset(evicted)


def _without_needless(
    gaps: Sequence[Gap], evicted: frozenset[int], needed_bytes: Sequence[int], budget_bytes: int
) -> frozenset[int]:
    """`evicted` less those that fit after all, since others left later: largest first."""
    load = load_of((gap for i, gap in enumerate(gaps) if i not in evicted), needed_bytes)
    given_up = set(evicted)
    for index in sorted(evicted, key=lambda i: (-gaps[i].num_bytes, len(gaps[i].span), i)):
        across = load[gaps[index].span.slice]
        if across.max() + gaps[index].num_bytes <= budget_bytes:
            across += gaps[index].num_bytes
            given_up.remove(index)
    return frozenset(given_up)


@dataclass(frozen=True, slots=True)
class Streamable:
    """An entry that may be streamed: `num_bytes` otherwise, `layer_bytes` on the device while it is used, at the price of
    `moved_bytes`."""

    num_bytes: int
    layer_bytes: int
    moved_bytes: int

    @property
    def saved_bytes(self) -> int:
        return self.num_bytes - self.layer_bytes


def choose_streams(entries: Sequence[Streamable], uses: Sequence[Sequence[int]], budget_bytes: int) -> frozenset[int]:
    """Indices of the entries that are streamed so that each operation fits; operation t uses the entries `uses[t]`."""
    streamed: set[int] = set()
    needed = [sum(entries[i].num_bytes for i in used) for used in uses]
    users: dict[int, list[int]] = {}
    for place, used in enumerate(uses):
        for index in used:
            users.setdefault(index, []).append(place)

    def toggle(index: int, sign: int) -> None:
        for place in users[index]:
            needed[place] -= sign * entries[index].saved_bytes

    for place in sorted(range(len(uses)), key=lambda t: -needed[t]):
        candidates = sorted(
            (i for i in uses[place] if entries[i].saved_bytes and i not in streamed),
            key=lambda i: (entries[i].moved_bytes / entries[i].saved_bytes, -entries[i].saved_bytes),
            reverse=True,
        )
        while needed[place] > budget_bytes:
            assert candidates, "an operation exceeds the budget even when all that it uses is streamed"
            streamed.add(candidates[-1])
            toggle(candidates.pop(), 1)
    for index in sorted(streamed, key=lambda i: (-entries[i].moved_bytes, i)):
        if all(needed[place] + entries[index].saved_bytes <= budget_bytes for place in users[index]):
            streamed.remove(index)
            toggle(index, -1)
    return frozenset(streamed)


def load_of(kept: Iterable[Gap], needed_bytes: Sequence[int]) -> np.ndarray:
    """Bytes on the device during each operation when the gaps `kept` are, int64 [operations]."""
    steps = np.zeros(len(needed_bytes) + 1, np.int64)
    for gap in kept:
        steps[gap.span.start] += gap.num_bytes
        steps[gap.span.stop] -= gap.num_bytes
    return np.cumsum(steps)[:-1] + np.asarray(needed_bytes, np.int64)
