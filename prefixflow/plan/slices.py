"""Attention of one microbatch as a list of slices (query range, key source, mask).

A microbatch is a flat batch of T tokens. A query attends, in total, to its own segment causally and to every
ancestor segment in full; each part is one slice, and the executor merges slices by logsumexp.

Invariants
1. The key ranges of the slices that cover a query are disjoint and together are exactly its ancestors and itself.
2. Every query is covered by exactly one causal local slice (padding too: it attends to itself).
3. A cached slice names blocks of one root path, root first, adjacent in position.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixflow.ranges import Range


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """Keys lie in this microbatch: gradients flow in the graph. `causal` needs equally long queries and keys."""

    queries: Range
    keys: Range
    causal: bool


@dataclass(frozen=True, slots=True)
class CachedSlice:
    """Keys lie in the cache: `blocks` are segment ids, root first; never masked; gradients go to gK/gV."""

    queries: Range
    blocks: tuple[int, ...]
